"""What every drafter must hold, ours and anybody's: run over all registered methods and their forms."""

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword import LLM, SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.registry import drafter_kinds
from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore, EngineParts
from foreword.engine.messages import NewRequest
from foreword.engine.request import Request
from foreword.errors import RequestError
from foreword.speculation import accept as judging
from foreword.speculation.drafting import Ask, Drafter
from foreword.speculation.measured.situation import Situation
from foreword.speculation.requests import DraftPlan, PassEntry, as_drafter_sees

FORMS: list[dict[str, Any]] = [
    {"method": "ngram", "num_speculative_tokens": 6, "fixed": True, "prompt_lookup_min": 1},
    {
        "method": "suffix",
        "num_speculative_tokens": 12,
        "fixed": True,
        "min_match": 1,
        "min_probability": 0.05,
    },
    {"method": "prediction", "num_speculative_tokens": 6, "fixed": True},
    {"method": ["prediction", "suffix"], "num_speculative_tokens": 9, "fixed": True, "combine": "merge"},
    {"method": "draft_model", "num_speculative_tokens": 4, "fixed": True},
    {"method": "draft_model", "num_speculative_tokens": 12, "fixed": True, "tree_width": 3},
    {"method": "layer_skip", "num_speculative_tokens": 3, "fixed": True, "exit_layer": 1},
    {
        "method": "layer_skip",
        "num_speculative_tokens": 9,
        "fixed": True,
        "layers": [1],
        "tree_width": 4,
        "max_depth": 3,
    },
    {"method": "self_quantized", "num_speculative_tokens": 4, "fixed": True, "bits": 4},
    {"method": "self_quantized", "num_speculative_tokens": 10, "fixed": True, "bits": 2, "tree_width": 2},
    {"method": ["suffix", "layer_skip"], "num_speculative_tokens": 5, "fixed": True},
    {"method": ["ngram", "draft_model"], "num_speculative_tokens": 10, "fixed": True, "combine": "merge"},
]


def form_id(form: dict[str, Any]) -> str:
    return "-".join(str(value) for value in form.values())


def test_every_registered_drafter_is_under_contract():
    methods = [form["method"] for form in FORMS]
    covered = {name for method in methods for name in ([method] if isinstance(method, str) else method)}
    assert covered == set(drafter_kinds())


@pytest.fixture(scope="module")
def draft_path(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with noise on its weights: like it, but not it."""
    path = tmp_path_factory.mktemp("draft") / "model"
    shutil.copytree(tiny_model, path)
    weights = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for tensor in weights.values():
        tensor.add_(0.1 * tensor.std() * torch.randn(tensor.shape, generator=generator))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model), dtype="float32", device="cpu")


@pytest.fixture(params=FORMS, ids=form_id)
def form(request: pytest.FixtureRequest, draft_path: Path) -> dict[str, Any]:
    config = {**request.param, "draft_timeout": 60.0}  # a busy machine is not a faulty drafter
    if "draft_model" in config["method"]:
        config["model"] = str(draft_path)
    return config


def mixed_params(count: int, max_tokens: int = 24) -> list[SamplingParams]:
    rng = random.Random(5)
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.2, "top_k": 20, "presence_penalty": 0.5},
        {"temperature": 0.3, "repetition_penalty": 1.3},
    ]
    return [
        SamplingParams(
            **kinds[i % len(kinds)], max_tokens=max_tokens, seed=rng.getrandbits(32), ignore_eos=i % 2 == 0
        )
        for i in range(count)
    ]


PROMPTS = [
    {"prompt_token_ids": [7]},
    {"prompt_token_ids": [20, 21, 22, 23] * 12},
    {"prompt_token_ids": [50] * 30},
    {"prompt_token_ids": list(range(30, 90))},
    {"prompt_token_ids": [5, 9] * 3 + list(range(100, 130)) + [5, 9]},
    {"prompt_token_ids": list(range(3, 3 + 340)) + list(range(3, 3 + 165))},
]


def answers(
    llm: LLM, prompts: Sequence[Any], params: Sequence[SamplingParams], expected: Any = None
) -> list[list[int]]:
    outputs = llm.generate(list(prompts), list(params), prediction=expected)
    return [output.outputs[0].token_ids for output in outputs]


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
    params = mixed_params(len(PROMPTS) * 2)
    assert answers(llm, PROMPTS * 2, params, predictions) == plain
    for index, (prompt, chosen, expected) in enumerate(zip(PROMPTS[:4], params[:4], plain[:4], strict=True)):
        assert answers(llm, [prompt], [chosen], [predictions[index]]) == [expected]


def test_guesses_are_made_and_accepted(llm: LLM, form: dict[str, Any]):
    """Otherwise the equality above would say nothing."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm.speculate(None)
    expected = answers(llm, PROMPTS[1:3], [greedy] * 2) if "prediction" in form["method"] else None
    llm.speculate(form)
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
    config = SpeculationConfig.parse(form)
    drafter = llm.build_drafter(config)
    policy = policy_type(drafter, config.num_speculative_tokens, config.max_depth, **options)
    return EngineCore(llm.engine.target, llm.loaded.vocabulary(), EngineParts(policy=policy)), drafter


def start(engine: EngineCore, predictions: list[tuple[int, ...]]) -> list[Request]:
    params = mixed_params(len(PROMPTS) * 2)
    return [
        engine.add(
            NewRequest(str(index), tuple(prompt["prompt_token_ids"]), chosen, prediction=predictions[index])
        )[0]
        for index, (prompt, chosen) in enumerate(zip(PROMPTS * 2, params, strict=True))
    ]


def test_a_drafter_that_was_off_catches_up(
    llm: LLM, form: dict[str, Any], plain: list[list[int]], predictions: list[tuple[int, ...]]
):
    engine, _ = engine_with(llm, form, Flickering, seed=3)
    requests = start(engine, predictions)
    while engine.has_requests:
        engine.step()
    assert [request.output_ids for request in requests] == plain


def test_a_drafter_guesses_as_a_fresh_one_would(
    llm: LLM, form: dict[str, Any], predictions: list[tuple[int, ...]]
):
    """Whatever was accepted, rejected or skipped before, its guesses are those of the committed text."""
    if "suffix" in form["method"]:
        form |= {"max_stored_tokens": 0}  # what it remembers of ended requests is not in question here
    engine, drafter = engine_with(llm, form, Flickering, seed=8)
    requests = start(engine, predictions)
    compared = 0
    for _ in range(5):
        for _ in range(4):
            engine.step()
        live = [r for r in requests if r.finish_reason is None and r.output_ids and r.room > 4]
        asks = [Ask(as_drafter_sees(request), 6, 3) for request in live]
        fresh = llm.build_drafter(SpeculationConfig.parse(form))
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
    engine, _ = engine_with(llm, form, FixedPolicy)
    requests = start(engine, predictions)
    rng = random.Random(1)
    forward, judge = engine.target.forward, judging.judge
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
    monkeypatch.setattr(judging, "judge", failing(judge))
    cancelled = {3, 8}
    for step in range(2000):
        if not engine.has_requests:
            break
        if step == 6:
            for index in cancelled:
                engine.abort(requests[index].name)
        engine.step()
        engine.check_integrity()
    assert engine.faults["step"] >= 3
    for index, (request, expected) in enumerate(zip(requests, plain, strict=True)):
        assert request.output_ids == expected[: len(request.output_ids)]
        assert index in cancelled or len(request.output_ids) == len(expected)
    assert engine.cache.available_pages == engine.cache.pool.num_pages


def test_ended_requests_leave_nothing_in_the_drafter(
    llm: LLM, form: dict[str, Any], predictions: list[tuple[int, ...]]
):
    engine, held_by = engine_with(llm, form, FixedPolicy)
    start(engine, predictions)
    while engine.has_requests:
        engine.step()
    for guard in _guards(held_by):
        drafter = guard._drafter
        held = [getattr(drafter, name, {}) for name in ("_indexes", "_readers", "_known")]
        assert not any(held)
        if hasattr(drafter, "_cache"):
            drafter.check_integrity()
            assert drafter._cache.available_pages == drafter._cache.pool.num_pages


def _guards(drafter: Any) -> list[Any]:
    return list(getattr(drafter, "_drafters", [drafter]))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("method", ["ngram", "draft_model", "layer_skip", "self_quantized"])
def test_chains_run_under_every_rule(tiny_model: Path, draft_path: Path, method: str, rule: str):
    """Greedy text is the plain one under each rule; sampled text has the right length and repeats by seed."""
    form = {"method": method, "num_speculative_tokens": 4, "fixed": True}
    if method == "draft_model":
        form["model"] = str(draft_path)
    config = EngineConfig(acceptance_rule=rule)
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", config=config, speculation=form)
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    sampled = SamplingParams(temperature=0.9, top_p=0.95, max_tokens=20, seed=4, ignore_eos=True)
    with_draft = answers(llm, PROMPTS[:4], [greedy] * 4)
    first, second = (answers(llm, PROMPTS[:4], [sampled] * 4) for _ in range(2))
    assert first == second
    llm.speculate(None)
    assert answers(llm, PROMPTS[:4], [greedy] * 4) == with_draft


@pytest.mark.parametrize(
    "form",
    [
        {"method": "suffix"},
        {"method": "layer_skip", "tree_width": 2},
        {"method": ["ngram", "layer_skip"], "combine": "merge"},
    ],
)
def test_trees_are_refused_by_rules_that_need_chains(tiny_model: Path, form: dict[str, Any]):
    config = EngineConfig(acceptance_rule="token")
    with pytest.raises(RequestError, match="chains only"):
        LLM(str(tiny_model), dtype="float32", device="cpu", config=config, speculation=form)
