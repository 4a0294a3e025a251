"""Published layouts of EAGLE heads: our draft logits, step by step, against the mathematics written down directly."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.engine.config import EngineConfig
from foreword.engine.messages import NewRequest
from foreword.kv.extra_rows import KEPT_STATES
from foreword.models.heads.files import expanded
from foreword.models.heads.opening import open_head
from foreword.models.heads.writing import GROUP, quantize_head, rounded_levels
from helpers.cpu import needs_cpu_kernels
from helpers.overheard import OverheardLevels
from helpers.slow_heads import SlowHead, target_states
from helpers.taught_heads import hf_target
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model

LAYERS, VOCAB = 6, 360
IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True)
class Layout:
    """One way to publish a head."""

    head: Callable[[], TinyHead]
    save: Callable[[TinyHead, Path], Path]
    boundaries: tuple[int, ...] = ()  # empty: the last layer, after the final norm
    flags: dict[str, bool] = field(default_factory=dict)
    target: dict[str, Any] = field(default_factory=dict)  # how the target differs


def eagle3(**options: Any) -> Callable[[], TinyHead]:
    return lambda: TinyHead(VOCAB, **options).eagle3()


def plain_feature() -> TinyHead:
    """As Model-Optimizer writes it without aux states: neither fc nor hidden_norm."""
    head = TinyHead(VOCAB, draft_vocab=200).eagle3()
    for name in ("fc.weight", "layers.0.hidden_norm.weight"):
        del head.tensors[name]
    return head


def without(head: TinyHead, *names: str) -> TinyHead:
    """Left to the target."""
    for name in names:
        head.tensors.pop(name, None)
    return head


def in_four_bits() -> TinyHead:
    """A head whose matrices are what 4 bits can hold."""
    head = TinyHead(VOCAB, draft_vocab=192, own_ends=False, inner=128).eagle3()
    for name, tensor in head.tensors.items():
        if tensor.ndim == 2:
            head.tensors[name] = expanded(*rounded_levels(tensor, 4), GROUP)
    return head


def save_rounded(head: TinyHead, path: Path) -> Path:
    plain = head.save(path.with_name(path.name + " in floats"), draft_vocab_size=192, **{IDS: [1, 3, 5]})
    quantize_head(open_head(plain), path, bits=4)
    assert open_head(path).files.bits == 4
    return path


SGLANG_NORMS = {"fc_norm.0.": "aux_norm_low.", "fc_norm.1.": "aux_norm_mid.", "fc_norm.2.": "aux_norm_high."}

LAYOUTS: dict[str, Layout] = {
    "EAGLE-3": Layout(
        eagle3(draft_vocab=200, own_ends=False),
        lambda head, path: head.save(path, {"layers.0.": "midlayer."}, draft_vocab_size=200),
        (2, 3, 3),
    ),
    "speculators": Layout(
        eagle3(draft_vocab=200),
        lambda head, path: head.save_speculators(path, norm_before_residual=True, **{IDS: [1, 4, 6]}),
        (1, 4, 6),
        {"norm_before_residual": True},
    ),
    "speculators, says nothing of the residual": Layout(
        eagle3(draft_vocab=150),
        lambda head, path: head.save_speculators(path, **{IDS: [0, 2, 5]}),
        (0, 2, 5),
        {"norm_before_residual": True},
    ),
    "SpecForge 3.1": Layout(
        eagle3(draft_vocab=200, own_ends=False, norms="each"),
        lambda head, path: head.save(
            path,
            {"layers.0.": "midlayer."},
            draft_vocab_size=200,
            fc_norm=True,
            norm_output=True,
            eagle_config={IDS: [1, 2, 4], "use_aux_hidden_state": True},
        ),
        (2, 3, 5),
        {"norm_output": True},
    ),
    "SGLang": Layout(
        eagle3(draft_vocab=200, layers=2, norms="each", fc_bias=True),
        lambda head, path: head.save(
            path,
            {**SGLANG_NORMS, "layers.1.input_layernorm.": "layers.1.hidden_norm."},
            draft_vocab_size=200,
            use_aux_norm=True,
        ),
        (2, 3, 3),
    ),
    "vLLM": Layout(
        eagle3(draft_vocab=200, norms="whole", bias=True),
        lambda head, path: head.save(
            path, {"": "model."}, draft_vocab_size=200, norm_before_fc=True, **{IDS: [3, 4, 5]}
        ),
        (3, 4, 5),
    ),
    "Model-Optimizer": Layout(
        lambda: without(TinyHead(VOCAB, draft_vocab=200).eagle3(), "t2d", "embed_tokens.weight"),
        lambda head, path: head.save(path, draft_vocab_size=200, eagle_config={IDS: [0, 2, 5]}),
        (1, 3, 6),
    ),
    "Model-Optimizer without aux states": Layout(
        plain_feature,
        lambda head, path: head.save(
            path, draft_vocab_size=200, eagle_config={"use_aux_hidden_state": False}
        ),
    ),
    "output rows of the target": Layout(
        lambda: without(TinyHead(VOCAB, draft_vocab=200, own_ends=False).eagle3(), "lm_head.weight"),
        lambda head, path: head.save(path, draft_vocab_size=200, **{IDS: [1, 2, 4]}),
        (1, 2, 4),
    ),
    "compressed-tensors, 4 bits": Layout(in_four_bits, save_rounded, (1, 3, 5)),
    "DeepSpec": Layout(
        eagle3(taps=5, qk_norm=True),
        lambda head, path: head.save(path, target_layer_ids=[0, 1, 2, 3, 4]),
        (1, 2, 3, 4, 5),
    ),
    "a narrower target": Layout(
        eagle3(draft_vocab=200, target_hidden=32),
        lambda head, path: head.save(path, draft_vocab_size=200, target_hidden_size=32, **{IDS: [1, 2, 3]}),
        (1, 2, 3),
        target={"hidden_size": 32},
    ),
    "EAGLE-1": Layout(
        lambda: without(TinyHead(VOCAB, fc_bias=True, own_ends=False).eagle()),
        lambda head, path: head.save(path, bias=True),
        flags={"fused": True},
    ),
    "EAGLE-1 without bias": Layout(
        lambda: TinyHead(VOCAB, bias=True).eagle(),
        lambda head, path: head.save(path, qkv_bias=True),
        flags={"fused": True},
    ),
    "EAGLE-1 of two layers, vLLM": Layout(
        lambda: TinyHead(VOCAB, layers=2).eagle(),
        lambda head, path: head.save(path, {"": "model."}),
        flags={"fused": True},
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("formats")


def target_path(folder: Path, layout: Layout) -> Path:
    path = folder / "-".join(["target", *map(str, layout.target.values())])
    return path if path.exists() else make_hf_model(path, num_hidden_layers=LAYERS, **layout.target)


class Reference:
    """A layout's head and target as the published mathematics has them."""

    def __init__(self, folder: Path, name: str) -> None:
        self._layout, self.path = LAYOUTS[name], folder / name
        self.target, head = target_path(folder, self._layout), self._layout.head()
        if not self.path.exists():
            self._layout.save(head, self.path)
        self._model = hf_target(self.target)
        tensors = dict(head.tensors)
        tensors.setdefault("embed_tokens.weight", self._model.model.embed_tokens.weight.detach())
        theirs = self._model.lm_head.weight.detach()
        tensors.setdefault("lm_head.weight", theirs[tensors["t2d"]] if "t2d" in tensors else theirs)
        self.tensors = tensors
        self._slow = SlowHead(tensors, head.config, self._layout.flags)
        self._states: dict[tuple[int, ...], torch.Tensor] = {}  # of the target, by text

    def load(self, speculation: dict[str, Any], backend: str, dtype: str, **options: Any) -> LLM:
        given = {"model": str(self.path), "fixed": True, **speculation}
        return LLM(str(self.target), dtype=dtype, device="cpu", backend=backend, speculation=given, **options)

    def logits(self, text: list[int], guesses: list[int], first: int = 1) -> torch.Tensor:
        """After a text and some guesses, for a head whose rows begin with token `first`."""
        boundaries, known = self._layout.boundaries, tuple(text[:-1])
        if known not in self._states:
            self._states[known] = target_states(self._model, known, boundaries, normed=not boundaries)
        states = self._states[known]
        return self._slow.chain(text[first - 1 :], states[first - 1 :], guesses, len(boundaries))[-1]


@cache
def reference_of(folder: Path, name: str) -> Reference:
    return Reference(folder, name)


PROMPT = {"prompt_token_ids": [*range(20, 60), 7]}


def compare(
    folder: Path, name: str, speculation: dict[str, Any], backend: str, dtype: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(ours, expected) for every row whose logits the head was asked for."""
    reference = reference_of(folder, name)
    llm = reference.load(speculation, backend, dtype)
    guard: Any = llm.engine.drafters.default.drafter
    overheard = OverheardLevels(guard._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert not guard.faults
    return [(logits, reference.logits(text, guesses)) for text, guesses, logits in overheard.found]


@pytest.mark.parametrize(
    ("backend", "dtype"), [("torch", "float32"), pytest.param("cpu", "float32", marks=needs_cpu_kernels)]
)
@pytest.mark.parametrize("name", LAYOUTS)
def test_draft_logits_are_those_of_the_published_mathematics(
    folder: Path, name: str, backend: str, dtype: str
):
    pairs = compare(folder, name, {"num_speculative_tokens": 3}, backend, dtype)
    assert len(pairs) >= 12
    for ours, expected in pairs:
        torch.testing.assert_close(ours.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
@pytest.mark.parametrize("name", ["EAGLE-3", "SGLang", "EAGLE-1"])
def test_a_node_of_a_tree_reads_its_own_ancestors(folder: Path, name: str, backend: str):
    shape = {"num_speculative_tokens": 12, "tree_width": 3, "max_depth": 4}
    pairs = compare(folder, name, shape, backend, "float32")
    assert len(pairs) >= 30
    for ours, expected in pairs:
        torch.testing.assert_close(ours.double(), expected, atol=2e-4, rtol=1e-4)


@needs_cpu_kernels
@pytest.mark.parametrize("name", ["EAGLE-3", "speculators", "EAGLE-1"])
def test_eight_bits_come_close(folder: Path, name: str):
    for ours, expected in compare(folder, name, {"num_speculative_tokens": 3}, "cpu", "int8"):
        assert (ours - expected).norm() < 0.15 * expected.norm()


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
@pytest.mark.parametrize("name", ["SGLang", "EAGLE-1"])
def test_a_head_that_joins_late_reads_the_text_from_there_on(folder: Path, name: str, backend: str):
    """The rows before its first are not seen, whatever they hold."""
    reference = reference_of(folder, name)
    llm = reference.load({"num_speculative_tokens": 3}, backend, "float32")
    overheard = OverheardLevels(llm.engine.drafters.default.drafter._drafter)
    engine = llm.engine
    (request,) = engine.add(
        NewRequest(
            "late", tuple(range(20, 60)), SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
        )
    )
    engine.situation.speculating = False
    while len(request.output_ids) < 100:
        engine.step()
    engine.situation.speculating = True
    for _ in range(3):
        engine.step()
    engine.abort("late")
    first = 40 + 99 - KEPT_STATES + 1
    assert len(overheard.found) == 9
    assert set(overheard.starts) == {first}
    for text, guesses, logits in overheard.found:
        expected = reference.logits(text, guesses, first)
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)


WINDOW = 12


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
@pytest.mark.parametrize("width", [1, 3])
def test_a_draft_attends_to_the_newest_positions_alone(folder: Path, backend: str, width: int):
    """The window counts from the first row that a draft computes, which is one of the last three here."""
    reference = reference_of(folder, "EAGLE-3")
    shape = {"num_speculative_tokens": 6, "tree_width": width, "max_depth": 3, "window": WINDOW}
    llm = reference.load(shape, backend, "float32")
    overheard = OverheardLevels(llm.engine.drafters.default.drafter._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    assert len(overheard.found) >= 12
    for (text, guesses, logits), start in zip(overheard.found, overheard.starts, strict=True):
        newest = len(text) - 1
        assert newest - 3 < start + WINDOW - 1 <= newest
        expected = reference.logits(text, guesses, start)
        torch.testing.assert_close(logits.double(), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_a_head_has_the_window_of_its_config_unless_another_is_given(
    folder: Path, tmp_path: Path, backend: str
):
    reference = reference_of(folder, "EAGLE-3")
    shutil.copytree(reference.path, tmp_path / "head")
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    config |= {"layer_types": ["sliding_attention"], "sliding_window": WINDOW}
    (tmp_path / "head" / "config.json").write_text(json.dumps(config))
    starts = {}
    for given in (0, 20):
        shape = {"model": str(tmp_path / "head"), "num_speculative_tokens": 3, "window": given}
        llm = reference.load(shape, backend, "float32")
        overheard = OverheardLevels(llm.engine.drafters.default.drafter._drafter)
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        starts[given] = overheard.starts[0]
    prompt = len(PROMPT["prompt_token_ids"])
    assert starts == {0: prompt + 1 - WINDOW, 20: prompt + 1 - 20}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("name", ["EAGLE-3", "EAGLE-1"])
def test_a_guess_tells_what_it_was_drawn_from(folder: Path, name: str, rule: str):
    """Over the target's ids: what the head does not know has no chance."""
    reference, temperature = reference_of(folder, name), 0.7
    config = EngineConfig(acceptance_rule=rule)
    llm = reference.load({"num_speculative_tokens": 3}, "torch", "float32", config=config)
    overheard = OverheardLevels(llm.engine.drafters.default.drafter._drafter)
    llm.generate(PROMPT, SamplingParams(temperature=temperature, max_tokens=12, ignore_eos=True, seed=1))
    offsets = reference.tensors.get("d2t", torch.zeros(VOCAB, dtype=torch.int64))
    ids = (torch.arange(len(offsets)) + offsets).tolist()
    compared = 0
    for text, draft in overheard.said:
        for node, q in enumerate(draft.drawn):
            assert q is not None
            law = (reference.logits(text, list(draft.tokens[:node])) / temperature).softmax(-1)
            assert q.ids.tolist() == ids
            torch.testing.assert_close(torch.from_numpy(q.probs.copy()), law, atol=1e-5, rtol=1e-3)
            compared += 1
    assert compared > 10
