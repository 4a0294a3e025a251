"""What every drafter must hold, ours and anybody's: run over all registered methods and their forms."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, SamplingParams
from foreword.acceptance.judge import Judging
from foreword.cluster.node_server import DraftNode
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import load_model
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.speculation.drafting import Drafter, DraftTask
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry, draft_request_of
from helpers.draft_nodes import connect, running_node, wait_patiently
from helpers.drafted_answers import PROMPTS, answers, mixed_params, noisy_copy, store_of_answers
from helpers.drafter_forms import FAMILIES, FORMS
from helpers.exits import write_exit


def test_every_registered_drafter_is_under_contract():
    methods = [form["method"] for form in FORMS]
    covered = {name for method in methods for name in ([method] if isinstance(method, str) else method)}
    assert covered == set(drafter_kinds())


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")


@pytest.fixture(scope="module")
def draft_path(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noisy_copy(tiny_model, tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="module")
def exit_path(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_exit(tiny_model, tmp_path_factory.mktemp("exit") / "model", layer=1)


@pytest.fixture(scope="module")
def datastore(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_of_answers(llm, tmp_path_factory.mktemp("datastore"))


@pytest.fixture(scope="module")
def node(draft_path: Path) -> Iterator[DraftNode]:
    """A draft node with the draft model."""
    draft = load_model(str(draft_path), dtype="float32", device="cpu", backend="cpu")
    with running_node(draft, {"method": "draft_model", "model": str(draft_path)}) as running:
        yield running


@dataclass(frozen=True)
class Family:
    """Forms of related drafters, and the answers of plain decoding to the requests that each of them gets."""

    forms: list[dict[str, Any]]
    plain: list[list[int]]  # to the requests of an even form, then to those of an odd one

    @property
    def configs(self) -> list[SpeculationConfig]:
        return [SpeculationConfig.parse(form) for form in self.forms]

    def asked(self, number: int) -> list["Asked"]:
        """The requests of this form: the prompts of one token and at the context's end, and another one.

        Parameters are others for every second form.
        """
        half, params, form = len(PROMPTS) * (number % 2), mixed_params(len(self.plain)), self.forms[number]
        return [
            Asked(form, PROMPTS[index], params[at], self.plain[at], prediction(form, self.plain[at]))
            for index in (0, 1 + number % 4, 5)
            for at in (half + index,)
        ]

    def all_asked(self) -> list["Asked"]:
        return [one for number in range(len(self.forms)) for one in self.asked(number)]


@dataclass(frozen=True)
class Asked:
    """A request, and the answer of plain decoding to it."""

    form: dict[str, Any] | bool
    prompt: dict[str, list[int]]
    params: SamplingParams
    expected: list[int]
    prediction: tuple[int, ...]

    def new(self, name: str) -> NewRequest:
        ids = tuple(self.prompt["prompt_token_ids"])
        return NewRequest(name, ids, self.params, speculation=self.form, prediction=self.prediction)


def prediction(form: dict[str, Any], answer: list[int]) -> tuple[int, ...]:
    """What a user expects, for drafters that go by it: the answer with one token replaced and one left out."""
    return (*answer[:5], 3, *answer[6:12], *answer[13:]) if "prediction" in form["method"] else ()


@pytest.fixture(params=FAMILIES)
def family(
    request: pytest.FixtureRequest,
    draft_path: Path,
    tiny_heads: dict[str, Path],
    datastore: Path,
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> Family:
    forms = []
    for form in FAMILIES[request.param]:
        config = {**form, "draft_timeout": 60.0}  # a busy machine is not a faulty drafter
        methods = [config["method"]] if isinstance(config["method"], str) else config["method"]
        for name, path in {"draft_model": draft_path, **tiny_heads}.items():
            if name in methods:
                config["model"] = str(path)
        if "remote" in methods:
            wait_patiently(monkeypatch)
            config |= {"drafters": str(request.getfixturevalue("node").address), "shadow": 0}
        if "adapter" in config:
            config["adapter"] = str(request.getfixturevalue("exit_path"))
        if "rest" in methods:
            config["datastore"] = str(datastore)
        forms.append(config)
    return Family(forms, plain)


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    llm.speculate(None)
    return answers(llm, PROMPTS * 2, mixed_params(len(PROMPTS) * 2))


def check_texts(asked: Sequence[Asked], texts: Sequence[Sequence[int]]) -> None:
    wrong = [one.form for one, text in zip(asked, texts, strict=True) if list(text) != one.expected]
    assert not wrong, f"other texts with {wrong}"


def offered(llm: LLM, family: Family) -> list[Drafter]:
    """The drafters of the family, ready for requests."""
    llm.offer(family.configs)
    drafters = [llm.engine.drafters.create_early(config) for config in family.configs]
    for drafter in drafters:
        connect(drafter)
    return drafters


def test_the_text_is_that_of_plain_decoding(llm: LLM, family: Family):
    """All forms in one batch, and one of them alone; prompts of one token, repetitive ones, one at the context's
    end.
    """
    offered(llm, family)

    def texts(asked: Sequence[Asked]) -> list[list[int]]:
        outputs = llm.generate(
            [one.prompt for one in asked],
            [one.params for one in asked],
            prediction=[one.prediction for one in asked],
            speculation=[one.form for one in asked],
        )
        return [output.outputs[0].token_ids for output in outputs]

    asked = family.all_asked()
    check_texts(asked, texts(asked))
    alone = family.asked(0)[1]
    check_texts([alone], texts([alone]))


def test_guesses_are_made_and_accepted(llm: LLM, family: Family):
    """Otherwise the equality above would say nothing."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = PROMPTS[1:3]
    expected = answers(llm, prompts, [greedy] * 2)
    drafters = offered(llm, family)
    count = len(family.forms)
    outputs = llm.generate(
        prompts * count,
        greedy,
        prediction=[
            text if "prediction" in form["method"] else None for form in family.forms for text in expected
        ],
        speculation=[form for form in family.forms for _ in prompts],
    )
    for form, first, second in zip(family.forms, outputs[::2], outputs[1::2], strict=True):
        assert first.timings.draft_n + second.timings.draft_n > 0, form
        assert first.timings.draft_n_accepted + second.timings.draft_n_accepted > 0, form
        assert first.timings.passes + second.timings.passes < 120, form
    assert all(not guard.faults for drafter in drafters for guard in _guards(drafter))


class Flickering(FixedPolicy):
    """Switches drafting off and on at random, request by request."""

    def __init__(self, *args: Any, seed: int) -> None:
        super().__init__(*args)
        self._rng = random.Random(seed)

    def plan(self, entries: Sequence[PassEntry], situation: Situation) -> list[DraftPlan | None]:
        plans = super().plan(entries, situation)
        return [plan if self._rng.random() < 0.3 else None for plan in plans]


def engine_with(
    llm: LLM, family: Family, policy_type: type[FixedPolicy], **options: Any
) -> tuple[EngineCore, list[Drafter]]:
    """An engine that is ready for all forms of the family, and their drafters."""
    parts = EngineParts(
        EngineConfig(max_step_seconds=None, max_draft_share=1e9),  # the same passes, however fast
        policy=policy_type(**options),
        build_drafter=llm.build_drafter,
        offered=family.configs,
    )
    engine = EngineCore(llm.engine.target, llm.loaded.vocabulary(), parts)
    drafters = [engine.drafters.create_early(config) for config in family.configs]
    for drafter in drafters:
        connect(drafter)
    return engine, drafters


def start(engine: EngineCore, asked: Sequence[Asked]) -> list[Request]:
    return [engine.add(one.new(str(index)))[0] for index, one in enumerate(asked)]


def test_a_drafter_that_was_off_catches_up(llm: LLM, family: Family):
    engine, drafters = engine_with(llm, family, Flickering, seed=3)
    asked = family.all_asked()
    requests = start(engine, asked)
    while engine.has_requests:
        engine.step()
    check_texts(asked, [request.output_ids for request in requests])
    check_nothing_is_held(drafters)


def test_a_drafter_guesses_as_a_fresh_one_would(llm: LLM, family: Family):
    """Whatever was accepted, rejected or skipped before, its guesses are those of the committed text.

    Not those that guess from the target's states: tests/integration/test_head_rows.py, test_heads_at_once.py; nor
    those that guess from what the target drew, which a fresh one has not seen; nor those that need its KV rows.
    """
    for form in family.forms:
        if "suffix" in form["method"]:
            form |= {"max_stored_tokens": 0}  # what it remembers of ended requests is not in question here
    engine, drafters = engine_with(llm, family, Flickering, seed=8)
    needs = [drafter.traits.needs for drafter in drafters]
    numbers = [n for n, one in enumerate(needs) if not (one.taps or one.draws or one.target_rows)]
    if not numbers:
        pytest.skip("all guess from the target's states")
    requests = {number: start_named(engine, family.asked(number), number) for number in numbers}
    compared = dict.fromkeys(numbers, 0)
    for _ in range(3):
        for _ in range(5):
            engine.step()
        for number in numbers:
            live = [r for r in requests[number] if r.finish_reason is None and r.output_ids and r.room > 4]
            asks = [DraftTask(draft_request_of(request), 6, 3) for request in live]
            fresh = llm.build_drafter(family.configs[number])
            connect(fresh)
            for _ in range(8):  # a long text may take several calls to catch up with
                expected, found = fresh.propose(asks), drafters[number].propose(asks)
            assert [draft.tokens for draft in found] == [draft.tokens for draft in expected]
            compared[number] += sum(len(draft) for draft in expected)
    assert all(compared.values()), compared


def start_named(engine: EngineCore, asked: Sequence[Asked], number: int) -> list[Request]:
    return [engine.add(one.new(f"{number} {index}"))[0] for index, one in enumerate(asked)]


def test_failures_and_cancellations_leave_no_trace(llm: LLM, family: Family, monkeypatch: pytest.MonkeyPatch):
    """The target's pass and acceptance fail now and then; some requests are cancelled halfway."""
    engine, drafters = engine_with(llm, family, FixedPolicy)
    asked = family.all_asked()
    requests = start(engine, asked)
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
    cancelled = {index for index in range(len(asked)) if index % 3 == 1}
    for step in range(2000):
        if not engine.has_requests:
            break
        if step == 6:
            for index in cancelled:
                engine.abort(requests[index].name)
        engine.step()
        engine.check_integrity()
    assert engine.faults["step"]
    for index, (request, one) in enumerate(zip(requests, asked, strict=True)):
        assert request.output_ids == one.expected[: len(request.output_ids)], one.form
        assert index in cancelled or len(request.output_ids) == len(one.expected), one.form
    assert engine.cache.available_pages == engine.cache.pool.num_pages
    check_nothing_is_held(drafters)


def retold(engine: EngineCore, asked: Sequence[Asked], preempt: bool) -> list[list[int]]:
    """Two answers to each request, then two more: what was read first is found again, or forked."""
    requests, rng = [], random.Random(6)
    for round_ in range(2):
        for index, one in enumerate(asked):
            params = SamplingParams(temperature=0.7 * round_, max_tokens=14, n=2, seed=3, ignore_eos=True)
            requests += engine.add(replace(one.new(f"{round_} {index}"), params=params))
        steps = 0
        while engine.has_requests:
            engine.step()
            engine.check_integrity()
            steps += 1
            if preempt and steps % 3 == 0:
                running = engine.scheduler.running
                for request in rng.sample(running, -(-len(running) // 4)):
                    engine.scheduler.preempt(request)
    return [request.output_ids for request in requests]


TWO_PROMPTS = (1, 3)


@pytest.fixture(scope="module")
def plainly_retold(llm: LLM) -> list[list[int]]:
    engine = EngineCore(llm.engine.target, llm.loaded.vocabulary())
    asked = [Asked(False, PROMPTS[index], SamplingParams(), [], ()) for index in TWO_PROMPTS]
    return retold(engine, asked, preempt=False)


def test_forks_preemptions_and_prefix_hits_do_not_show(
    llm: LLM, family: Family, plainly_retold: list[list[int]]
):
    engine, drafters = engine_with(llm, family, Flickering, seed=5)
    count = len(family.forms)
    asked = [
        Asked(form, PROMPTS[index], SamplingParams(), [], prediction(form, family.plain[index]))
        for form in family.forms
        for index in TWO_PROMPTS
    ]
    found = retold(engine, asked, preempt=True)
    first, second = plainly_retold[:4], plainly_retold[4:]
    assert found == first * count + second * count
    assert engine.scheduler.preemptions > 3 * count
    assert engine.cache.prefix_hits > 0
    assert all(not guard.faults for drafter in drafters for guard in _guards(drafter))
    assert engine.cache.available_pages == engine.cache.pool.num_pages
    check_nothing_is_held(drafters)


HELD = ("_indexes", "_readers", "_known", "_sequences", "_states", "_rankings")
"""What drafters keep by request."""


def check_nothing_is_held(by: Sequence[Drafter]) -> None:
    for guard in (guard for drafter in by for guard in _guards(drafter)):
        drafter = guard._drafter
        held = [getattr(drafter, name, {}) for name in HELD]
        assert not any(held)
        if hasattr(drafter, "_cache"):
            drafter.check_integrity()
            assert drafter._cache.available_pages == drafter._cache.pool.num_pages


def _guards(drafter: Any) -> list[Any]:
    return list(getattr(drafter, "_drafters", [drafter]))
