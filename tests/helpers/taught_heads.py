"""Heads that guess right now and then: their output matrix is fitted to texts of the target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from foreword import LLM, SamplingParams
from helpers.drafted_answers import PROMPTS, answers
from helpers.slow_heads import SlowHead, target_states
from helpers.tiny_heads import TinyHead


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
    places = {token: place for place, token in enumerate(ids)}
    said = torch.zeros(len(wanted), len(ids), dtype=torch.float64)
    for row, token in enumerate(wanted):
        if token in places:
            said[row, places[token]] = 8.0
    x = torch.cat(states)
    ridge = x.T @ x + 1e-2 * torch.eye(x.shape[1], dtype=torch.float64)
    head.tensors["lm_head.weight"] = torch.linalg.solve(ridge, x.T @ said).T.float().contiguous()


def taught_heads(llm: LLM, model: Path, folder: Path) -> dict[str, Path]:
    """A head of every method that was taught the target's own greedy texts."""
    target, vocab = hf_target(model), llm.loaded.vocab_size
    llm.speculate(None)
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS[:4]]
    texts = [
        p + a for p, a in zip(prompts, answers(llm, PROMPTS[:4], [greedy] * 4), strict=True) if len(p) > 1
    ]
    eagle3 = TinyHead(vocab, draft_vocab=300).eagle3()
    teach(eagle3, target, texts, (0, 1, 2))
    eagle = TinyHead(vocab, fc_bias=True).eagle()
    teach(eagle, target, texts, (2,), fused=True)
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    return {
        "eagle3": eagle3.save(folder / "eagle3", {"layers.0.": "midlayer."}, draft_vocab_size=300, **layers),
        "eagle": eagle.save(folder / "eagle"),
    }
