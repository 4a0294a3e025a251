"""A head's chain in one native call is the chain that it makes level by level."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.engine.config import EngineConfig
from foreword.engine.llm import LLM
from foreword.engine.messages import NewRequest
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask
from helpers.cpu import needs_cpu_kernels
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model

pytestmark = needs_cpu_kernels

SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
MIXED: list[dict[str, Any]] = [{"temperature": 0}, SAMPLED, {"temperature": 1.3}, {"temperature": 0}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chains")
    make_hf_model(folder / "target", num_hidden_layers=6)
    TinyHead(360, draft_vocab=201).eagle3().save(folder / "eagle3", draft_vocab_size=201)
    TinyHead(360).eagle().save(folder / "eagle")
    module = TinyHead(360, bias=True).mtp()
    module.save(folder / "mtp", {"": "model.layers.6."})
    return folder


class Listener:
    """What a head's drafter says, in one call of its runner where it can or always level by level."""

    def __init__(self, drafter: Any, in_one_call: bool) -> None:
        self.drafts: list[tuple[tuple[int, ...], ...]] = []
        self.chains = 0
        self._propose, self._chain = drafter.propose, drafter._runner.chain
        drafter.propose = self.propose
        drafter._runner.chain = self.chain if in_one_call else lambda *_: None

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts: list[Draft] = self._propose(asks)
        self.drafts.append(tuple(draft.tokens for draft in drafts))
        return drafts

    def chain(self, *arguments: object) -> object:
        self.chains += 1
        return self._chain(*arguments)


def decoded(
    folder: Path, method: str, params: list[dict[str, Any]], in_one_call: bool, rule: str = "coupled"
) -> tuple[Listener, list[list[int]]]:
    """The drafts and texts of requests that are answered together, each to a length of its own."""
    config = {"method": method, "model": str(folder / method), "num_speculative_tokens": 5, "fixed": True}
    llm = LLM(
        str(folder / "target"),
        device="cpu",
        backend="cpu",
        speculation=config,
        config=EngineConfig(acceptance_rule=rule, max_step_seconds=None),  # the same passes, however fast
    )
    guard: Any = llm.engine.drafters.default
    listener = Listener(guard.drafter._drafter, in_one_call)
    requests = []
    for number, given in enumerate(params):
        sampling = SamplingParams(max_tokens=20 + 7 * number, ignore_eos=True, seed=number, **given)
        prompt = tuple(range(20 + number, 60 + 9 * number))
        requests += llm.engine.add(NewRequest(f"r{number}", prompt, sampling))
    while llm.engine.has_requests:
        llm.engine.step()
    assert not guard.drafter.faults
    return listener, [list(request.output_ids) for request in requests]


@pytest.mark.parametrize("method", ["eagle3", "eagle", "mtp"])
def test_one_call_gives_the_guesses_of_one_call_per_level(folder: Path, method: str):
    together, texts = decoded(folder, method, MIXED, in_one_call=True)
    levels, same_texts = decoded(folder, method, MIXED, in_one_call=False)
    assert texts == same_texts
    assert together.drafts == levels.drafts
    asked = [
        step for step in together.drafts if any(step)
    ]  # before the first token there is nothing to go on
    assert together.chains == len(asked) > 20
    assert {len(tokens) for step in together.drafts for tokens in step} >= {1, 2, 3, 4, 5}, "ends are shorter"


@pytest.mark.parametrize(
    ("params", "rule"),
    [([{"temperature": 0, "logit_bias": {7: 5.0}}], "coupled"), ([{"temperature": 0.8}], "token")],
)
def test_guesses_that_need_more_than_logits_are_made_level_by_level(
    folder: Path, params: list[dict[str, Any]], rule: str
):
    listener, _ = decoded(folder, "eagle3", params, in_one_call=True, rule=rule)
    assert not listener.chains
    assert any(map(len, (tokens for step in listener.drafts for tokens in step)))
