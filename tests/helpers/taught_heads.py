"""Heads that guess right now and then: their output matrix is fitted to texts of the target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foreword import LLM, SamplingParams
from helpers.drafted_answers import PROMPTS, answers
from helpers.slow_heads import SlowHead, target_states
from helpers.slow_parallel_heads import SlowDFlash
from helpers.tiny_heads import HIDDEN, TinyHead

BLOCK, MASK = 6, 11
"""Of DFlash heads: rows of a block, and the token of those that are not known."""

DEEPSEEK_NAMES = {
    "fc.": "model.layers.9.eh_proj.",
    "norm.": "model.layers.9.shared_head.norm.",
    "lm_head.": "model.layers.9.shared_head.head.",
    "enorm.": "model.layers.9.enorm.",
    "hnorm.": "model.layers.9.hnorm.",
    "embed_tokens.": "model.layers.9.embed_tokens.",
    "layers.0.": "model.layers.9.",
}
"""How an MTP module's tensors begin, by the names that other heads have."""


def hf_target(path: Path) -> Any:
    """The target as transformers runs it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def teach(
    head: TinyHead,
    target: Any,
    texts: Sequence[Sequence[int]],
    boundaries: Sequence[int],
    *,
    fused: bool = False,
    **flags: bool,
) -> None:
    """Give the head the output matrix that says best what follows in these texts."""
    slow = SlowHead(head.tensors, head.config, {"fused": fused, **flags})
    states, wanted = [], []
    for text in texts:
        features = target_states(target, text[:-1], boundaries, normed=fused)
        reduced = slow.reduced(features.double(), len(boundaries))
        rows = len(text) - 2  # the last token has nothing behind it
        seen = torch.ones(rows, rows).tril().bool()
        _, own = slow.rows(text[1:-1], reduced[:rows], torch.arange(rows), seen)
        states.append(slow.norm(own, "norm.weight"))
        wanted += text[2:]
    if "d2t" in head.tensors:
        ids = (torch.arange(head.draft_vocab) + head.tensors["d2t"]).tolist()
    else:
        ids = list(range(head.vocab))
    head.tensors["lm_head.weight"] = fitted(torch.cat(states), wanted, ids)


def teach_medusa(head: TinyHead, heads: int, target: Any, texts: Sequence[Sequence[int]]) -> None:
    """Give every head the output matrix that says best what stands at its place ahead."""
    for number in range(heads):
        states, wanted = [], []
        for text in texts:
            known = target_states(target, text, (), normed=True).double()[: len(text) - 2 - number]
            weight, bias = (head.tensors[f"{number}.0.linear.{name}"].double() for name in ("weight", "bias"))
            states.append(known + torch.nn.functional.silu(known @ weight.T + bias))
            wanted += text[2 + number :]
        head.tensors[f"{number}.1.weight"] = fitted(torch.cat(states), wanted, list(range(head.vocab)))


def teach_dflash(
    head: TinyHead, target: Any, texts: Sequence[Sequence[int]], boundaries: Sequence[int]
) -> None:
    """Give the head the output matrix that says best what its masks stand for."""
    slow = SlowDFlash(head.tensors, head.config)
    states, wanted = [], []
    for text in texts:
        known = target_states(target, text, boundaries)
        for newest in range(8, len(text) - BLOCK):
            states.append(slow.block(text[: newest + 1], known[:newest], BLOCK, MASK)[1:])
            wanted += text[newest + 1 : newest + BLOCK]
    ids = (torch.arange(head.draft_vocab) + head.tensors["d2t"]).tolist()
    head.tensors["lm_head.weight"] = fitted(torch.cat(states), wanted, ids)


def fitted(states: torch.Tensor, wanted: Sequence[int], ids: Sequence[int]) -> torch.Tensor:
    """The matrix [ids, hidden] that maps states [rows, hidden] to the wanted tokens, by least squares."""
    places = {token: place for place, token in enumerate(ids)}
    said = torch.zeros(len(wanted), len(ids), dtype=torch.float64)
    for row, token in enumerate(wanted):
        if token in places:
            said[row, places[token]] = 8.0
    ridge = states.T @ states + 1e-2 * torch.eye(states.shape[1], dtype=torch.float64)
    return torch.linalg.solve(ridge, states.T @ said).T.float().contiguous()


def taught_heads(llm: LLM, model: Path, folder: Path) -> dict[str, Path]:
    """A head of every method that was taught the target's own greedy texts."""
    llm.speculate(None)
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS[:4]]
    texts = [
        p + a for p, a in zip(prompts, answers(llm, PROMPTS[:4], [greedy] * 4), strict=True) if len(p) > 1
    ]
    return saved_heads(hf_target(model), texts, llm.loaded.vocab_size, (0, 1, 2), folder)


def saved_heads(
    target: Any, texts: Sequence[Sequence[int]], vocab: int, boundaries: tuple[int, ...], folder: Path
) -> dict[str, Path]:
    """A head of every method that was taught these texts; `boundaries` end with the target's last layer."""
    layers = {"eagle_aux_hidden_state_layer_ids": list(boundaries)}
    eagle3 = TinyHead(vocab, draft_vocab=300).eagle3()
    teach(eagle3, target, texts, boundaries)
    eagle = TinyHead(vocab, fc_bias=True).eagle()
    teach(eagle, target, texts, boundaries[-1:], fused=True)
    p_eagle = TinyHead(vocab, draft_vocab=300, seed=1).p_eagle()
    teach(p_eagle, target, texts, boundaries)
    mtp = TinyHead(vocab, bias=True).eagle()
    for name in ("enorm", "hnorm", "norm", "layers.0.input_layernorm"):
        mtp.vector(name + ".weight", HIDDEN)
    teach(mtp, target, texts, boundaries[-1:], fused=True)
    medusa = TinyHead(vocab).medusa(4)
    teach_medusa(medusa, 4, target, texts)
    dflash = TinyHead(vocab, taps=len(boundaries), draft_vocab=300, qk_norm=True).dflash()
    teach_dflash(dflash, target, texts, boundaries)
    dspark = TinyHead(vocab, taps=len(boundaries), draft_vocab=300).dspark(HIDDEN)
    dspark.tensors["markov_head.markov_w2.weight"] *= 0.05  # what it was taught counts for more
    teach_dflash(dspark, target, texts, boundaries)
    dflash2 = TinyHead(vocab, taps=len(boundaries), draft_vocab=300, qk_norm=True).dflash2()
    dflash2.tensors["candidate_selector.successor_codebook"] *= 0.05  # what it was taught counts for more
    teach_dflash(dflash2, target, texts, boundaries)
    block = {"block_size": BLOCK, "mask_token_id": MASK, "aux_hidden_state_layer_ids": list(boundaries)}
    choices = [[0], [0, 0], [1], [0, 1], [0, 0, 0], [2], [1, 0], [0, 0, 0, 0], [3, 1, 2]]
    return {
        "eagle3": eagle3.save(folder / "eagle3", {"layers.0.": "midlayer."}, draft_vocab_size=300, **layers),
        "eagle": eagle.save(folder / "eagle"),
        "p_eagle": p_eagle.save(folder / "p_eagle", draft_vocab_size=300, mask_token_id=MASK, **layers),
        "mtp": mtp.save(folder / "mtp", DEEPSEEK_NAMES),
        "medusa": medusa.save(folder / "medusa", {"": "medusa_head."}, medusa_choices=choices),
        "dflash": dflash.save_speculators(folder / "dflash", "dflash", **block),
        "dflash2": dflash2.save_speculators(folder / "dflash2", "dflash2", **block),
        "dspark": dspark.save_speculators(folder / "dspark", "dspark", **block, sample_from_anchor=False),
    }
