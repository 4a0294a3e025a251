"""What every drafter must hold, ours and anybody's: run over all registered methods and their forms."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.acceptance.judge import Judging
from foreword.cluster.node_server import DraftNode
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.loader import load_model
from foreword.engine.messages import NewRequest
from foreword.engine.parts import EngineParts
from foreword.engine.requests.request import Request
from foreword.speculation.drafting import Ask, Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry, as_drafter_sees
from helpers.draft_nodes import connect, running_node, wait_patiently
from helpers.drafted_answers import PROMPTS, answers, mixed_params, noisy_copy, store_of_answers
from helpers.drafter_forms import FORMS
from helpers.exits import write_exit
from helpers.taught_heads import taught_heads


def form_id(form: dict[str, Any]) -> str:
    return "-".join(str(value) for value in form.values())


def test_every_registered_drafter_is_under_contract():
    methods = [form["method"] for form in FORMS]
    covered = {name for method in methods for name in ([method] if isinstance(method, str) else method)}
    assert covered == set(drafter_kinds())


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def draft_path(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tiny_model, tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="module")
def head_paths(llm: LLM, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return taught_heads(llm, tiny_model, tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def exit_path(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exit(tiny_model, tmp_path_factory.mktemp("exit") / "model", layer=1)


@pytest.fixture(scope="module")
def datastore(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of_answers(llm, tmp_path_factory.mktemp("datastore"))


@pytest.fixture(scope="module")
def node(draft_path: Path) -> Iterator[DraftNode]:
    """A draft node with the draft model."""
    draft = load_model(str(draft_path), dtype="float32", device="cpu")
    with running_node(draft, {"method": "draft_model", "model": str(draft_path)}) as running:
        yield running


@pytest.fixture(params=FORMS, ids=form_id)
def form(
    request: pytest.FixtureRequest,
    draft_path: Path,
    head_paths: dict[str, Path],
    datastore: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> dict[str, Any]:
    config = {**request.param, "draft_timeout": 60.0}  # a busy machine is not a faulty drafter
    methods = [config["method"]] if isinstance(config["method"], str) else config["method"]
    for name, path in {"draft_model": draft_path, **head_paths}.items():
        if name in methods:
            config["model"] = str(path)
    if "remote" in methods:
        wait_patiently(monkeypatch)
        config |= {"drafters": str(request.getfixturevalue("node").address), "shadow": 0}
    if "adapter" in config:
        config["adapter"] = str(request.getfixturevalue("exit_path"))
    if "rest" in methods:
        config["datastore"] = str(datastore)
    return config


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    llm.speculate(None)
    return answers(llm, PROMPTS * 2, mixed_params(len(PROMPTS) * 2))


@pytest.fixture
def predictions(form: dict[str, Any], plain: list[list[int]]) -> list[tuple[int, ...]]:
    """What users expect, for drafters that go by it: the answers with one token replaced and one left out."""
    if "prediction" not in form["method"]:
        return [()] * len(plain)
    return [(*answer[:5], 3, *answer[6:12], *answer[13:]) for answer in plain]


def test_the_text_is_that_of_plain_decoding(
    llm: LLM, form: dict[str, Any], plain: list[list[int]], predictions: list[tuple[int, ...]]
):
    """Together in one batch and alone; prompts of one token, repetitive ones, one at the context's end."""
    llm.speculate(form)
    connect(llm.engine.drafters.default.drafter)
    params = mixed_params(len(PROMPTS) * 2)
    assert answers(llm, PROMPTS * 2, params, predictions) == plain
    for index in (0, 1):
        assert answers(llm, [PROMPTS[index]], [params[index]], [predictions[index]]) == [plain[index]]


def test_guesses_are_made_and_accepted(llm: LLM, form: dict[str, Any]):
    """Otherwise the equality above would say nothing."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.speculate(None)
    expected = answers(llm, PROMPTS[1:3], [greedy] * 2) if "prediction" in form["method"] else None
    llm.speculate(form)
    connect(llm.engine.drafters.default.drafter)
    outputs = llm.generate(PROMPTS[1:3], greedy, prediction=expected)
    assert sum(output.timings.draft_n for output in outputs) > 0
    assert sum(output.timings.draft_n_accepted for output in outputs) > 0
    assert sum(output.timings.passes for output in outputs) < 120
    assert all(not guard.faults for guard in _guards(llm.engine.drafters.default.drafter))


class Flickering(FixedPolicy):
    """Switches drafting off and on at random, request by request."""

    def __init__(self, *args: Any, seed: int) -> None:
        super().__init__(*args)
        self._rng = random.Random(seed)

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        plans = super().plan(entries, situation)
        return [plan if self._rng.random() < 0.3 else None for plan in plans]


def engine_with(
    llm: LLM, form: dict[str, Any], policy_type: type[FixedPolicy], **options: Any
) -> tuple[EngineCore, Drafter]:
    """An engine whose requests are all drafted for so, and the drafter."""
    parts = EngineParts(
        EngineConfig(max_step_seconds=None, max_draft_share=1e9),  # the same passes, however fast
        policy=policy_type(**options),
        build_drafter=llm.build_drafter,
        speculation=SpeculationConfig.parse(form),
    )
    engine = EngineCore(llm.engine.target, llm.loaded.vocabulary(), parts)
    assert engine.drafters.default is not None
    connect(engine.drafters.default.drafter)
    return engine, engine.drafters.default.drafter


def start(engine: EngineCore, predictions: list[tuple[int, ...]]) -> list[Request]:
    """Every prompt once: the first answers of `plain`."""
    params = mixed_params(len(PROMPTS))
    return [
        engine.add(
            NewRequest(str(index), tuple(prompt["prompt_token_ids"]), chosen, prediction=predictions[index])
        )[0]
        for index, (prompt, chosen) in enumerate(zip(PROMPTS, params, strict=True))
    ]


def test_a_drafter_that_was_off_catches_up(
    llm: LLM, form: dict[str, Any], plain: list[list[int]], predictions: list[tuple[int, ...]]
):
    engine, drafter = engine_with(llm, form, Flickering, seed=3)
    requests = start(engine, predictions)
    while engine.has_requests:
        engine.step()
    assert [request.output_ids for request in requests] == plain[: len(PROMPTS)]
    check_nothing_is_held(drafter)


def test_a_drafter_guesses_as_a_fresh_one_would(
    llm: LLM, form: dict[str, Any], predictions: list[tuple[int, ...]]
):
    """Whatever was accepted, rejected or skipped before, its guesses are those of the committed text."""
    if "suffix" in form["method"]:
        form |= {"max_stored_tokens": 0}  # what it remembers of ended requests is not in question here
    engine, drafter = engine_with(llm, form, Flickering, seed=8)
    if drafter.traits.needs.taps:
        pytest.skip(
            "it guesses from the target's states: tests/integration/test_head_rows.py, test_heads_at_once.py"
        )
    if drafter.traits.needs.draws:
        pytest.skip("it guesses from what the target drew, which a fresh one has not seen")
    requests = start(engine, predictions)
    compared = 0
    for _ in range(5):
        for _ in range(4):
            engine.step()
        live = [r for r in requests if r.finish_reason is None and r.output_ids and r.room > 4]
        asks = [Ask(as_drafter_sees(request), 6, 3) for request in live]
        fresh = llm.build_drafter(SpeculationConfig.parse(form))
        connect(fresh)
        for _ in range(8):  # a long text may take several calls to catch up with
            expected, found = fresh.propose(asks), drafter.propose(asks)
        assert [draft.tokens for draft in found] == [draft.tokens for draft in expected]
        compared += sum(len(draft) for draft in expected)
    assert compared > 0


def test_failures_and_cancellations_leave_no_trace(
    llm: LLM,
    form: dict[str, Any],
    plain: list[list[int]],
    predictions: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
):
    """The target's pass and acceptance fail now and then; some requests are cancelled halfway."""
    engine, drafter = engine_with(llm, form, FixedPolicy)
    requests = start(engine, predictions)
    rng = random.Random(1)
    forward, verdicts = engine.target.forward, Judging.verdicts
    last_fault = [0]  # calls since then; a request that fails whatever is tried would be given up

    def failing(real: Any) -> Any:
        def call(*args: Any) -> Any:
            last_fault[0] += 1
            if last_fault[0] > 4 and rng.random() < 0.3:
                last_fault[0] = 0
                raise ConnectionError("planted")
            return real(*args)

        return call

    monkeypatch.setattr(engine.target, "forward", failing(forward))
    monkeypatch.setattr(Judging, "verdicts", failing(verdicts))
    cancelled = {1, 3}
    for step in range(2000):
        if not engine.has_requests:
            break
        if step == 6:
            for index in cancelled:
                engine.abort(requests[index].name)
        engine.step()
        engine.check_integrity()
    assert engine.faults["step"]
    for index, (request, expected) in enumerate(zip(requests, plain[: len(PROMPTS)], strict=True)):
        assert request.output_ids == expected[: len(request.output_ids)]
        assert index in cancelled or len(request.output_ids) == len(expected)
    assert engine.cache.available_pages == engine.cache.pool.num_pages
    check_nothing_is_held(drafter)


def retold(engine: EngineCore, predictions: Sequence[tuple[int, ...]], preempt: bool) -> list[list[int]]:
    """Two answers to each of two prompts, then two more: what was read first is found again, or forked."""
    requests, rng = [], random.Random(6)
    for round_ in range(2):
        for index in (1, 3):
            prompt = tuple(PROMPTS[index]["prompt_token_ids"])
            params = SamplingParams(temperature=0.7 * round_, max_tokens=14, n=2, seed=index, ignore_eos=True)
            requests += engine.add(
                NewRequest(f"{round_} {index}", prompt, params, prediction=predictions[index])
            )
        steps = 0
        while engine.has_requests:
            engine.step()
            engine.check_integrity()
            steps += 1
            if preempt and steps % 3 == 0 and engine.scheduler.running:
                engine.scheduler.preempt(rng.choice(engine.scheduler.running))
    return [request.output_ids for request in requests]


@pytest.fixture(scope="module")
def plainly_retold(llm: LLM) -> list[list[int]]:
    return retold(EngineCore(llm.engine.target, llm.loaded.vocabulary()), [()] * len(PROMPTS), preempt=False)


def test_forks_preemptions_and_prefix_hits_do_not_show(
    llm: LLM, form: dict[str, Any], predictions: list[tuple[int, ...]], plainly_retold: list[list[int]]
):
    engine, drafter = engine_with(llm, form, Flickering, seed=5)
    assert retold(engine, predictions, preempt=True) == plainly_retold
    assert engine.scheduler.preemptions > 3
    assert engine.cache.prefix_hits > 0
    assert all(not guard.faults for guard in _guards(drafter))
    assert engine.cache.available_pages == engine.cache.pool.num_pages
    check_nothing_is_held(drafter)


def check_nothing_is_held(held_by: Drafter) -> None:
    for guard in _guards(held_by):
        drafter = guard._drafter
        held = [getattr(drafter, name, {}) for name in ("_indexes", "_readers", "_known")]
        assert not any(held)
        if hasattr(drafter, "_cache"):
            drafter.check_integrity()
            assert drafter._cache.available_pages == drafter._cache.pool.num_pages


def _guards(drafter: Any) -> list[Any]:
    return list(getattr(drafter, "_drafters", [drafter]))
