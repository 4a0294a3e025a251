"""Published layouts of heads that guess many tokens in one pass, against their mathematics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword import LLM, SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig
from foreword.engine.messages import NewRequest
from foreword.kv.extra_rows import KEPT_STATES
from helpers.cpu import needs_cpu_kernels
from helpers.overheard import OverheardPlaces
from helpers.slow_heads import SlowHead, target_states
from helpers.slow_parallel_heads import SlowDFlash, slow_medusa, slow_p_eagle
from helpers.taught_heads import hf_target
from helpers.tiny_heads import HIDDEN, TinyHead
from helpers.tiny_models import make_hf_model

LAYERS, VOCAB, MASK, GUESSES = 6, 360, 11, 4
IDS = "eagle_aux_hidden_state_layer_ids"
PROMPT = {"prompt_token_ids": [*range(20, 60), 7]}


@dataclass(frozen=True)
class Layout:
    """One way to publish a head."""

    method: str
    head: Callable[[], TinyHead]
    save: Callable[[TinyHead, Path], Path]
    boundaries: tuple[int, ...] = ()  # empty: the last layer, after the final norm
    flags: dict[str, bool] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)


def vllm_medusa() -> TinyHead:
    head = TinyHead(VOCAB, draft_vocab=200).medusa(4, bias=False)
    head.tensors["token_map"] = (
        torch.randperm(VOCAB, generator=head.generator)[: head.draft_vocab].sort().values
    )
    return head


def save_for_vllm(head: TinyHead, path: Path) -> Path:
    names = {f"{i}.0.linear.": f"blocks.{i}.layers.0." for i in range(9)}
    names |= {f"{i}.1.": f"lm_heads.{i}." for i in range(9)}
    return head.save(path, names, model_type="medusa", vocab_size=VOCAB, hidden_size=HIDDEN)


def medusa_2(head: TinyHead, path: Path) -> Path:
    """A whole model in one file with its heads."""
    make_hf_model(path, num_hidden_layers=LAYERS)
    tensors = load_file(path / "model.safetensors")
    tensors |= {"medusa_head." + name: tensor.contiguous() for name, tensor in head.tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


LAYOUTS: dict[str, Layout] = {
    "Medusa": Layout(
        "medusa",
        lambda: TinyHead(VOCAB).medusa(5),
        lambda head, path: head.save(path, base_model_name_or_path="a/b"),
        sizes={"heads": 5, "blocks": 1},
    ),
    "Medusa of two blocks": Layout(
        "medusa",
        lambda: TinyHead(VOCAB).medusa(4, blocks=2),
        lambda head, path: head.save(path, {"": "medusa_heads."}),
        sizes={"heads": 4, "blocks": 2},
    ),
    "Medusa-2": Layout(
        "medusa", lambda: TinyHead(VOCAB).medusa(4), medusa_2, sizes={"heads": 4, "blocks": 1}
    ),
    "Medusa, vLLM": Layout(
        "medusa",
        vllm_medusa,
        save_for_vllm,
        sizes={"heads": 4, "blocks": 1},
    ),
    "Medusa with the target's output": Layout(
        "medusa",
        lambda: TinyHead(VOCAB).medusa(4, outputs=False),
        lambda head, path: head.save(path, vocab_size=VOCAB),
        sizes={"heads": 4, "blocks": 1},
    ),
    "P-EAGLE, speculators": Layout(
        "p_eagle",
        lambda: TinyHead(VOCAB, draft_vocab=200).p_eagle(),
        lambda head, path: head.save_speculators(path, "peagle", mask_token_id=MASK, **{IDS: [1, 4, 6]}),
        (1, 4, 6),
    ),
    "P-EAGLE, SpecForge": Layout(
        "p_eagle",
        lambda: TinyHead(VOCAB, layers=2, norms="each", own_ends=True).p_eagle(),
        lambda head, path: head.save(
            path, {"layers.0.": "midlayer."}, ptd_token_id=MASK, fc_norm=True, norm_before_residual=True
        ),
        (2, 3, 3),
        {"norm_before_residual": True},
    ),
    "DFlash": Layout(
        "dflash",
        lambda: TinyHead(VOCAB, taps=3, layers=2, qk_norm=True, own_ends=False).dflash(),
        lambda head, path: head.save(
            path,
            architectures=["DFlashDraftModel"],
            block_size=6,
            dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2, 5]},
        ),
        (1, 3, 6),
        sizes={"block": 6},
    ),
    "DFlash, speculators": Layout(
        "dflash",
        lambda: TinyHead(VOCAB, taps=2, draft_vocab=200, bias=True).dflash(),
        lambda head, path: head.save_speculators(
            path, "dflash", block_size=5, mask_token_id=MASK, aux_hidden_state_layer_ids=[2, 4]
        ),
        (2, 4),
        sizes={"block": 5},
    ),
    "DFlash, causal, usual layers": Layout(
        "dflash",
        lambda: TinyHead(VOCAB, taps=3, own_ends=False).dflash(),
        lambda head, path: head.save(
            path, dflash_config={"mask_token_id": MASK, "block_size": 6, "causal": True}
        ),
        (2, 3, 4),
        {"causal": True},
        {"block": 6},
    ),
    "DFlash, DeepSpec": Layout(
        "dflash",
        lambda: TinyHead(VOCAB, taps=2, own_ends=False).dflash(),
        lambda head, path: head.save(
            path,
            architectures=["Qwen3DSparkModel"],
            block_size=4,
            mask_token_id=MASK,
            target_layer_ids=[1, 4],
        ),
        (2, 5),
        {"anchor": True},
        {"block": 4},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("at_once")
    make_hf_model(folder / "target", num_hidden_layers=LAYERS)
    return folder


class Reference:
    """A layout's head and target as the published mathematics has them."""

    def __init__(self, folder: Path, name: str) -> None:
        self._layout, self.path, self.target = LAYOUTS[name], folder / name, folder / "target"
        self._head = self._layout.head()
        if not self.path.exists():
            self._layout.save(self._head, self.path)
        self._model = hf_target(self.target)
        self.tensors = dict(self._head.tensors)
        self.tensors.setdefault("embed_tokens.weight", self._model.model.embed_tokens.weight.detach())
        self.output = self.tensors.get("lm_head.weight", self._model.lm_head.weight.detach())
        self.tensors["lm_head.weight"] = self.output

    def load(self, speculation: dict[str, Any], backend: str, dtype: str, **options: Any) -> LLM:
        given = {"model": str(self.path), "method": self._layout.method, "fixed": True, **speculation}
        return LLM(str(self.target), dtype=dtype, device="cpu", backend=backend, speculation=given, **options)

    def logits(self, text: list[int], guesses: int, first: int = 0) -> Tensor:
        """[places, draft vocabulary] after a text, for a head whose rows are made from states from `first` on."""
        layout, boundaries = self._layout, self._layout.boundaries
        states = target_states(self._model, text[:-1], boundaries, normed=not boundaries)
        if layout.method == "medusa":
            return slow_medusa(self.tensors, states[-1], **layout.sizes, output=self.output)
        if layout.method == "p_eagle":
            slow = SlowHead(self.tensors, self._head.config, layout.flags)
            return slow_p_eagle(slow, text[first:], states[first:], guesses - 1, MASK, len(boundaries))
        slow_block = SlowDFlash(self.tensors, self._head.config, layout.flags.get("causal", False))
        rows = slow_block.block(text, states, layout.sizes["block"], MASK, first)
        return (rows if layout.flags.get("anchor") else rows[1:]) @ self.output.double().T


def compare(folder: Path, name: str, backend: str, dtype: str) -> list[tuple[Tensor, Tensor]]:
    """(ours, expected) for every guess."""
    reference = Reference(folder, name)
    llm = reference.load({"num_speculative_tokens": GUESSES}, backend, dtype)
    guard: Any = llm.engine.drafters.default.drafter
    overheard = OverheardPlaces(guard._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert not guard.faults
    assert len(overheard.found) >= 5
    return [(logits, reference.logits(text, len(logits))[: len(logits)]) for text, logits in overheard.found]


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_draft_logits_are_those_of_the_published_mathematics(folder: Path, name: str, backend: str):
    for ours, expected in compare(folder, name, backend, "float32"):
        torch.testing.assert_close(ours.double(), expected, atol=2e-4, rtol=1e-4)


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["Medusa", "P-EAGLE, speculators", "DFlash"])
def test_eight_bits_come_close(folder: Path, name: str):
    for ours, expected in compare(folder, name, "cpu", "int8"):
        assert (ours - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_method_is_read_from_the_file(folder: Path, name: str):
    reference = Reference(folder, name)
    assert SpeculationConfig.parse({"model": str(reference.path)}).method == (LAYOUTS[name].method,)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["Medusa, vLLM", "P-EAGLE, speculators", "DFlash, speculators"])
def test_a_guess_tells_what_it_was_drawn_from(folder: Path, name: str, rule: str):
    """Over the target's ids; of one place whatever was guessed for those before it."""
    reference, temperature = Reference(folder, name), 0.7
    config = EngineConfig(acceptance_rule=rule)
    llm = reference.load({"num_speculative_tokens": 3}, "torch", "float32", config=config)
    overheard = OverheardPlaces(llm.engine.drafters.default.drafter._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=1))
    tensors = reference.tensors
    ids = tensors["token_map"] if "token_map" in tensors else torch.arange(200) + tensors["d2t"]
    compared = 0
    for text, draft in overheard.said:
        laws = (reference.logits(text, 3) / temperature).softmax(-1)
        for node, q in enumerate(draft.drawn):
            assert q is not None
            assert q.ids.tolist() == ids.tolist()
            torch.testing.assert_close(torch.from_numpy(q.probs.copy()), laws[node], atol=1e-5, rtol=1e-3)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
@pytest.mark.parametrize("name", ["P-EAGLE, SpecForge", "DFlash"])
def test_a_head_that_joins_late_reads_the_text_from_there_on(folder: Path, name: str, backend: str):
    """The rows before its first are not seen, whatever they hold."""
    reference = Reference(folder, name)
    llm = reference.load({"num_speculative_tokens": 3}, backend, "float32")
    overheard, engine = OverheardPlaces(llm.engine.drafters.default.drafter._drafter), llm.engine
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    (request,) = engine.add(NewRequest("late", tuple(range(20, 60)), params))
    engine.situation.speculating = False
    while len(request.output_ids) < 100:
        engine.step()
    engine.situation.speculating = True
    for _ in range(3):
        engine.step()
    engine.abort("late")
    assert len(overheard.found) == 3
    for text, logits in overheard.found:
        expected = reference.logits(text, len(logits), 40 + 99 - KEPT_STATES)[: len(logits)]
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)
