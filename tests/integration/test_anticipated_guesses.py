"""Guesses begun behind passes that are still judged: they are those that would have been made afterwards."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import LoadedModel
from foreword.engine.messages import AnswerDelta, NewRequest
from foreword.speculation import pipeline
from foreword.speculation.accept import Acceptance
from foreword.speculation.drafting import KvMemory
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry, Verdict
from helpers.anticipating import AnticipatingRunner, let_anticipate
from helpers.cpu import needs_cpu_kernels
from helpers.fresh_rows import Fresh
from helpers.taught_heads import hf_target, saved_heads
from integration.test_head_rows import TAUGHT, Flickering, _run, failing_passes, model, plain_text  # noqa: F401

pytestmark = needs_cpu_kernels


@pytest.fixture(scope="module")
def form(model: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:  # noqa: F811
    texts = [[*prompt, *plain_text(model, prompt, 30)] for prompt in TAUGHT]
    folder: Path = tmp_path_factory.mktemp("heads")
    found = saved_heads(hf_target(model.checkpoint.path), texts, 360, (1, 3, 5), folder)
    return {"method": "eagle3", "model": str(found["eagle3"]), "num_speculative_tokens": 3}


def engine(
    loaded: LoadedModel, form: dict[str, Any], policy: type[FixedPolicy], memory: int = 32 << 20
) -> tuple[EngineCore, AnticipatingRunner, Any]:
    config = SpeculationConfig.parse(form)
    drafter: Any = loaded.build_drafter(config)
    runner = let_anticipate(drafter)
    sizes = EngineConfig(
        max_num_batched_tokens=48,
        max_num_seqs=4,
        kv_cache_memory_bytes=memory,
        max_draft_share=100.0,
        max_step_seconds=None,
    )
    parts = EngineParts(sizes, policy(drafter, config.num_speculative_tokens, config.max_depth))
    return EngineCore(loaded.decoder, loaded.vocabulary(), parts), runner, drafter


def test_rows_in_the_pages_are_those_of_the_text(model: LoadedModel, form: dict[str, Any]):  # noqa: F811
    """Through chunks, forks, preemptions, prefix hits, failures and steps without guesses."""
    core, runner, drafter = engine(model, form, Flickering)
    with failing_passes(core):
        compared, _, _ = _run(core, Fresh(model, form), drafter.traits.needs.rows[0].name, random.Random(2))
    assert compared > 400
    assert core.cache.prefix_hits > 0
    assert core.scheduler.preemptions > 0
    assert runner.anticipated > runner.anew > 20
    assert not drafter.faults
    assert set(core.faults) == {"step"}


class Breathing(FixedPolicy):
    """Wants now more, now fewer guesses, by where a text has come to."""

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        plans = super().plan(entries, situation)
        depths = [1 + (len(entry.request.tokens) // 9) % 4 for entry in entries]
        return [
            None if plan is None else replace(plan, max_nodes=depth, max_depth=depth)
            for plan, depth in zip(plans, depths, strict=True)
        ]


def answered(core: EngineCore) -> dict[tuple[str, int], tuple[list[int], list[tuple[int, ...]]]]:
    """Tokens and guesses of some requests, by name and sample; they come one after the other."""
    rng, said = random.Random(5), {}
    for number in range(8):
        prompt = rng.choice(TAUGHT) if number % 3 else tuple(rng.choices(range(3, 360), k=20))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.7)),
            seed=number,
            max_tokens=rng.randrange(20, 40),
            n=1 + number % 2,
            ignore_eos=True,
            stop_token_ids=[rng.randrange(360) for _ in range(8)],
        )
        core.add(NewRequest(f"r{number}", prompt, params, progress=True))
        for _ in range(4):
            _note(core.step(), said)
    while core.has_requests:
        _note(core.step(), said)
    core.check_integrity()
    return said


def _note(deltas: list[AnswerDelta], said: dict[tuple[str, int], Any]) -> None:
    for delta in deltas:
        tokens, guesses = said.setdefault((delta.request_id, delta.index), ([], []))
        tokens += delta.token_ids
        guesses += [draft.tokens for draft in delta.drafts]


@pytest.fixture
def troubled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some passes fail when they are judged, and some rows of a head are lost: what was begun behind them must go."""
    judge, draft_early = Acceptance.verdicts, pipeline.draft_early

    def failing(self: Acceptance) -> list[Verdict]:
        if sum(len(entry.request.tokens) for entry in self.entries) % 23 == 0 and any(map(len, self.drafts)):
            raise ConnectionError("planted")
        return judge(self)

    def forgetful(launched: pipeline.Launched, memory: KvMemory) -> bool:
        for entry in launched.transaction.entries:
            if len(entry.request.tokens) % 11 == 0:
                for rows in entry.kv.extra.values():
                    rows.clip(rows.end - 2)
        return draft_early(launched, memory)

    monkeypatch.setattr(Acceptance, "verdicts", failing)
    monkeypatch.setattr(pipeline, "draft_early", forgetful)


@pytest.mark.usefixtures("troubled")
@pytest.mark.parametrize("policy", [FixedPolicy, Breathing])
@pytest.mark.parametrize("few_pages", [False, True])
def test_they_are_the_guesses_of_a_text_that_is_known(
    model: LoadedModel,  # noqa: F811
    form: dict[str, Any],
    policy: type[FixedPolicy],
    few_pages: bool,
):
    found, used = [], []
    for ahead in (True, False):
        core, runner, drafter = engine(model, form, policy, 1 << 17 if few_pages else 32 << 20)
        drafter.traits = replace(drafter.traits, starts_early=ahead)
        found.append(answered(core))
        used.append(runner)
        assert not drafter._drafter._early._early, "nothing is kept for requests that have ended"
        assert not drafter.faults
        assert set(core.faults) <= {"step"}
    assert found[0] == found[1]
    assert used[1].anticipated == 0
    if not few_pages:
        assert used[0].anew < used[1].anew / (4 if policy is FixedPolicy else 2)


def test_the_text_is_the_plain_one(model: LoadedModel, form: dict[str, Any]):  # noqa: F811
    core, _, _ = engine(model, form, FixedPolicy)
    plain = EngineCore(model.decoder, model.vocabulary())
    texts = [{name: tokens for name, (tokens, _) in answered(one).items()} for one in (core, plain)]
    assert texts[0] == texts[1]
