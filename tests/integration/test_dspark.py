"""DSpark's Markov head and confidence against their mathematics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from foreword import LLM, SamplingParams
from foreword.engine.config import EngineConfig
from foreword.errors import RequestError
from helpers.cpu import needs_cpu_kernels
from helpers.overheard import OverheardPlaces
from helpers.slow_heads import target_states
from helpers.slow_parallel_heads import SlowDFlash
from helpers.taught_heads import hf_target
from helpers.tiny_heads import HIDDEN, TinyHead
from helpers.tiny_models import make_hf_model

LAYERS, VOCAB, MASK, BLOCK, RANK = 6, 360, 11, 5, 8
PROMPT = {"prompt_token_ids": [*range(20, 60), 7]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dspark")
    make_hf_model(folder / "target", num_hidden_layers=LAYERS)
    return folder


class Reference:
    """A head in DeepSpec's layout, and its guesses written down directly."""

    def __init__(self, folder: Path, confidence: int) -> None:
        self.head = TinyHead(VOCAB, taps=2, qk_norm=True, own_ends=False).dspark(confidence)
        self.target, self.path = folder / "target", folder / f"head {confidence}"
        names = {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "mask_token_id": MASK}
        if not self.path.exists():
            self.head.save(self.path, **names, block_size=BLOCK, target_layer_ids=[1, 4])
        self._model = hf_target(self.target)
        self.tensors = dict(self.head.tensors)
        self.tensors["embed_tokens.weight"] = self._model.model.embed_tokens.weight.detach()
        self._output = self._model.lm_head.weight.detach().double()

    def load(self, backend: str = "torch", rule: str = "coupled", **form: Any) -> tuple[LLM, OverheardPlaces]:
        given = {"method": "dspark", "model": str(self.path), "num_speculative_tokens": BLOCK, "fixed": True}
        llm = LLM(
            str(self.target),
            dtype="float32",
            device="cpu",
            backend=backend,
            speculation={**given, **form},
            config=EngineConfig(acceptance_rule=rule),
        )
        return llm, OverheardPlaces(llm.engine.drafters.default.drafter._drafter)

    def places(self, text: list[int], guesses: list[int]) -> tuple[Tensor, list[float]]:
        """Logits of all places behind these guesses, and how sure the head is of each."""
        states = target_states(self._model, text[:-1], (2, 5))
        z = SlowDFlash(self.tensors, self.head.config).block(text, states, BLOCK, MASK)
        before = [text[-1], *guesses][:BLOCK]
        w1, w2 = (self.tensors[f"markov_head.markov_w{n}.weight"].double() for n in "12")
        z = z[: len(before)]
        logits = z @ self._output.T + w1[before] @ w2.T
        weight = self.tensors.get("confidence_head.proj.weight")
        if weight is None:
            return logits, []
        read = z if weight.shape[1] == HIDDEN else torch.cat((z, w1[before]), -1)
        sure = torch.sigmoid(read @ weight[0].double() + self.tensors["confidence_head.proj.bias"].double())
        return logits, sure.tolist()


@pytest.mark.parametrize("backend", ["torch", pytest.param("cpu", marks=needs_cpu_kernels)])
def test_the_token_before_has_a_say(folder: Path, backend: str):
    reference = Reference(folder, 0)
    llm, overheard = reference.load(backend)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=14, ignore_eos=True))
    said = [(text, list(draft.tokens)) for text, draft in overheard.said if len(draft)]
    assert len(said) >= 8
    differ = 0
    for text, tokens in said:
        logits, _ = reference.places(text, tokens[:-1])
        assert tokens == logits.argmax(-1).tolist()
        other, _ = reference.places(text, [0] * (len(tokens) - 1))
        differ += tokens != other.argmax(-1).tolist()
    assert differ > 0, "behind another token, other tokens would be guessed"


def test_a_guess_tells_what_it_was_drawn_from(folder: Path):
    reference = Reference(folder, 0)
    llm, overheard = reference.load(rule="token")
    llm.generate(PROMPT, SamplingParams(temperature=0.7, max_tokens=12, ignore_eos=True, seed=1))
    compared = 0
    for text, draft in overheard.said:
        laws = (reference.places(text, list(draft.tokens))[0] / 0.7).softmax(-1)
        for node, q in enumerate(draft.drawn):
            assert q is not None
            expected = laws[node][torch.from_numpy(q.ids.copy())]
            torch.testing.assert_close(torch.from_numpy(q.probs.copy()), expected, atol=1e-5, rtol=1e-3)
            compared += 1
    assert compared > 10


@pytest.mark.parametrize("width", [HIDDEN, HIDDEN + RANK])
def test_a_draft_ends_where_the_head_is_not_sure(folder: Path, width: int):
    reference = Reference(folder, width)
    llm, overheard = reference.load(confidence=0.5)
    llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    lengths = set()
    for text, draft in overheard.said[1:-BLOCK]:
        _, sure = reference.places(text, [*draft.tokens, 0])
        assert all(chance >= 0.5 for chance in sure[: len(draft)])
        assert len(draft) == BLOCK or sure[len(draft)] < 0.5
        lengths.add(len(draft))
    assert len(lengths) > 1


def test_confidence_needs_a_head_for_it(folder: Path):
    with pytest.raises(RequestError, match="no confidence head"):
        Reference(folder, 0).load(confidence=0.5)
    with pytest.raises(RequestError, match="at least 0 and below 1"):
        Reference(folder, 0).load(confidence=1.0)
