"""What a drafter's calls cost on this machine, measured when an engine first starts with it and kept for the next."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.core import EngineCore
from foreword.engine.requests.request import Request, RequestLimits
from foreword.kv.sequence import KvSequence
from foreword.speculation.drafting import DraftRequest, choices_of
from foreword.speculation.measured.costs import StepCosts
from foreword.speculation.requests import DraftPlan, PassEntry, as_drafter_sees
from foreword.speculation.step import Stepper

_log = logging.getLogger(__name__)

DEPTHS = (1, 2, 3, 4)
ROUNDS = 4
BUDGET_SECONDS = 0.5

PROMPT = (0, 0, 0, 0)
NOBODYS = "nobody's"
"""The tenant of texts that nobody reads; others are hashes of keys, or empty."""

WARM_UP = 2  # steps: the first has no states of the prompt, the second fills caches

Calls = dict[str, list[float]]
"""By method, as `CallCost` writes itself."""


def begin_with_calls(
    core: EngineCore,
    configs: Sequence[SpeculationConfig],
    kept_at: Callable[[str], Path],
    write: Callable[[Path, str], None],
    clock: Callable[[], float] = perf_counter,
    *,
    use_saved: bool = True,
) -> None:
    """Give a new engine the cost of these drafters' calls; `kept_at` is the file of a drafter's settings."""
    for config in configs:
        path = kept_at(json.dumps(config.as_mapping(), sort_keys=True))
        if use_saved and _read_calls(path, core.situation.costs):
            continue
        plan = core.drafters.resolve(config.as_mapping())
        if plan is None:
            continue
        try:
            calls = measure_calls(core, plan, clock)
            core.situation.costs.begin_with_calls(calls)
        except Exception:  # it is found out while it is used, then
            _log.info("what %s costs was not measured at the start", plan.method, exc_info=True)
            continue
        write(path, json.dumps({"calls": calls}))


def _read_calls(path: Path, costs: StepCosts) -> bool:
    """Use the saved cost of calls; return whether there was a sound one."""
    try:
        costs.begin_with_calls(json.loads(path.read_text(encoding="utf-8"))["calls"], are_saved=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return False
    return True


def measure_calls(core: EngineCore, plan: DraftPlan, clock: Callable[[], float] = perf_counter) -> Calls:
    """A few steps of a text that nobody wants, with ever deeper drafts, until the time is up. The engine is idle."""
    single = [replace(plan, method=name, drafter=one) for name, one in choices_of(plan.drafter).items()]
    calls: Calls = {}
    for one in single or [plan]:
        calls |= _measure_one(core, one, clock)
    return calls


def _measure_one(core: EngineCore, plan: DraftPlan, clock: Callable[[], float]) -> Calls:
    stepper = Stepper(core.runner, core.cache, FixedPolicy(), clock=clock, store=core.runner.store)
    request = unwanted_request(core, PROMPT)
    began = clock()
    try:
        for number in range(WARM_UP + ROUNDS * len(DEPTHS)):
            depth = DEPTHS[number % len(DEPTHS)]
            if number == WARM_UP:
                stepper.situation.costs = StepCosts()
            if depth > plan.max_depth or request.room <= depth + 1:
                continue
            request.speculation = replace(plan, max_nodes=depth, max_depth=depth, is_fixed=True)
            run = len(request.tokens) - request.kv.computed
            if (report := stepper.step([PassEntry.of(request, run)])).is_cold:
                began += report.seconds.total
            if number >= WARM_UP + len(DEPTHS) and clock() - began > BUDGET_SECONDS:
                break
    finally:
        core.cache.close(request.kv)
        plan.drafter.forget(as_unanswered(request))
    calls: Calls = stepper.situation.costs.as_json()["calls"]
    return calls


def as_unanswered(request: Request) -> DraftRequest:
    """As if all of its text had been asked: drafters that remember answers are to remember none of it."""
    return as_drafter_sees(request)._replace(prompt_len=len(request.tokens))


def unwanted_request(
    core: EngineCore,
    prompt: Sequence[int],
    *,
    number: int = 0,
    temperature: float = 0.0,
    kv: KvSequence | None = None,
) -> Request:
    """One whose text nobody reads, the engine being idle; whoever made it closes its KV rows."""
    size = core.runner.vocab_size
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    tokens = [token % size for token in prompt]
    sampler = RequestSampler(params, TokenLimits(size), tokens, seed=0)
    request = Request(number, tokens, params, sampler, RequestLimits(core.max_model_len, frozenset()))
    request.tenant = NOBODYS  # drafters that remember answers have them for nobody else
    request.kv = core.cache.open(NOBODYS) if kv is None else kv
    return request
