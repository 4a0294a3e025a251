"""DFlash2's convolutions and candidate selector against their mathematics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword import LLM, SamplingParams
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig
from foreword.errors import CheckpointError
from foreword.models.heads.opening import open_head
from foreword.models.heads.writing import quantize_head
from helpers.cpu import needs_cpu_kernels
from helpers.overheard import OverheardPlaces
from helpers.slow_heads import target_states
from helpers.slow_parallel_heads import SlowDFlash
from helpers.taught_heads import hf_target
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model

LAYERS, VOCAB, MASK, BLOCK, CANDIDATES = 6, 360, 11, 5, 6
PROMPT = {"prompt_token_ids": [*range(20, 60), 7]}
SCALED = {"output_multiplier": 0.5, "final_logit_softcapping": 3.0, "input_embedding_scale": 2.0}
BACKENDS = ["torch", pytest.param("cpu", marks=needs_cpu_kernels)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash2")
    make_hf_model(folder / "target", num_hidden_layers=LAYERS)
    return folder


class Reference:
    """A head in the published layout, and its drafts computed directly."""

    def __init__(self, folder: Path, settings: dict[str, float], taps: int = 2) -> None:
        self.head = TinyHead(VOCAB, taps=2, layers=2, qk_norm=True, own_ends=False).dflash2(taps)
        self.target, self.path = folder / "target", folder / f"head {len(settings)} {taps}"
        self.settings = settings
        block = {"block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": [1, 4]}
        if not self.path.exists():
            self.head.save(
                self.path,
                architectures=["DFlash2DraftModel"],
                dflash_config={**block, "selector_top_k": CANDIDATES, **settings},
            )
        self._model = hf_target(self.target)
        self.tensors = dict(self.head.tensors)
        self.tensors["embed_tokens.weight"] = self._model.model.embed_tokens.weight.detach()
        self._output = self._model.lm_head.weight.detach().double()

    def load(self, backend: str = "torch", rule: str = "coupled", **more: Any) -> tuple[LLM, OverheardPlaces]:
        given = {"model": str(self.path), "num_speculative_tokens": BLOCK - 1, "fixed": True}
        llm = LLM(
            str(self.target),
            dtype="float32",
            device="cpu",
            backend=backend,
            speculation={**given, **more},
            config=EngineConfig(acceptance_rule=rule),
        )
        return llm, OverheardPlaces(llm.engine.drafters.default.drafter._drafter)

    def scores(self, text: list[int], drafted: list[int]) -> Tensor:
        """Return the selector's logits after these draft tokens, [positions, vocab]; -inf for other tokens."""
        states = target_states(self._model, text[:-1], (2, 5))
        scale = self.settings.get("input_embedding_scale", 1.0)
        slow = SlowDFlash(self.tensors, self.head.config, embedding_scale=scale)
        z = slow.block(text, states, BLOCK, MASK)[1:]
        predecessor, successor = (
            self.tensors[f"candidate_selector.{name}_codebook"].double()
            for name in ("predecessor", "successor")
        )
        projection = self.tensors["candidate_selector.hidden_projection.weight"].double()
        result = torch.full((len(z), VOCAB), -torch.inf, dtype=torch.float64)
        for position, previous in enumerate([text[-1], *drafted][: len(z)]):
            logits = self._output @ z[position]
            for token in logits.argsort(descending=True)[:CANDIDATES].tolist():
                score = logits[token] * self.settings.get("output_multiplier", 1.0)
                if "final_logit_softcapping" in self.settings:
                    cap = self.settings["final_logit_softcapping"]
                    score = cap * torch.tanh(score / cap)
                bonus = predecessor[previous] * (projection @ z[position]) * successor[token]
                result[position, token] = score + bonus.sum()
        return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("settings", "taps"), [({}, 2), (SCALED, 3)])
def test_drafts_are_the_selectors_walk(folder: Path, backend: str, settings: dict[str, float], taps: int):
    reference = Reference(folder, settings, taps)
    llm, overheard = reference.load(backend)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    drafts = [(text, list(draft.tokens)) for text, draft in overheard.said if len(draft)]
    assert len(drafts) >= 8
    differ = 0
    for text, tokens in drafts:
        scores = reference.scores(text, tokens[:-1])
        assert tokens == scores.argmax(-1).tolist()[: len(tokens)]
        other = reference.scores(text, [0] * (len(tokens) - 1))
        differ += tokens != other.argmax(-1).tolist()[: len(tokens)]
    assert differ > 0, "after another token, other tokens would be drafted"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_draft_has_the_distribution_that_it_was_drawn_from(folder: Path, backend: str):
    reference = Reference(folder, {})
    llm, overheard = reference.load(backend, rule="token")
    llm.generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=1))
    compared = 0
    for text, draft in overheard.said:
        expected = (reference.scores(text, list(draft.tokens)) / 0.7).softmax(-1)
        for node, q in enumerate(draft.drawn):
            assert q is not None
            assert int((q.probs > 0).sum()) <= CANDIDATES
            wanted = expected[node][torch.from_numpy(q.ids.copy())]
            torch.testing.assert_close(torch.from_numpy(q.probs.copy()), wanted, atol=1e-5, rtol=1e-3)
            compared += 1
    assert compared > 10


def test_the_method_is_read_from_the_file(folder: Path):
    reference = Reference(folder, {})
    assert SpeculationConfig.parse({"model": str(reference.path)}).method == ("dflash2",)
    spec = open_head(reference.path).spec
    assert spec.convolution is not None and (spec.convolution.taps, spec.convolution.group) == (2, 8)
    assert spec.selector is not None and spec.selector.candidates == CANDIDATES


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("candidate_selector.successor_codebook", "lacks tensor candidate_selector.successor_codebook"),
        ("layers.1.mlp_conv.base_kernel", "lacks tensor layers.1.mlp_conv.base_kernel"),
        ("candidate_selector.", "output_multiplier and without a candidate selector"),
    ],
)
def test_incomplete_heads_are_refused(folder: Path, tmp_path: Path, missing: str, message: str):
    head = TinyHead(VOCAB, taps=2, layers=2, qk_norm=True, own_ends=False).dflash2()
    head.tensors = {name: tensor for name, tensor in head.tensors.items() if not name.startswith(missing)}
    block = {"block_size": BLOCK, "mask_token_id": MASK, "output_multiplier": 0.5}
    with pytest.raises(CheckpointError, match=message):
        open_head(head.save(tmp_path / "head", dflash_config=block))


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        ({}, {"output_multiplier": 0.5}, "output_multiplier outside of dflash_config"),
        (
            {"markov_head.markov_w1.weight": (VOCAB, 4), "markov_head.markov_w2.weight": (VOCAB, 4)},
            {},
            "Markov",
        ),
        ({"candidate_selector.predecessor_codebook": ()}, {}, "candidate_selector.* has shape"),
        ({"layers.0.attention_conv.kernel_projection.weight": ()}, {}, "does not fit base_kernel"),
    ],
)
def test_contradictory_heads_are_refused(
    tmp_path: Path, tensors: dict[str, tuple[int, ...]], config: dict[str, float], message: str
):
    head = TinyHead(VOCAB, taps=2, layers=2, qk_norm=True, own_ends=False).dflash2()
    head.tensors |= {name: torch.zeros(shape) for name, shape in tensors.items()}
    block = {"block_size": BLOCK, "mask_token_id": MASK}
    with pytest.raises(CheckpointError, match=message):
        open_head(head.save(tmp_path / "head", dflash_config=block, **config), "dflash2")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_quantised_head_drafts_nearly_the_same(folder: Path, tmp_path: Path, backend: str):
    reference = Reference(folder, {})
    quantize_head(open_head(reference.path), tmp_path / "small")
    drafts = []
    for path in (reference.path, tmp_path / "small"):
        llm, overheard = reference.load(backend, model=str(path))
        llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
        drafts.append([token for _, draft in overheard.said for token in draft.tokens])
    same = sum(ours == other for ours, other in zip(*drafts, strict=False))
    assert same > 0.6 * len(drafts[0])
