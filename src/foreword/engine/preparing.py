"""Passes that will surely come, run once before the first request: none waits while they are compiled and captured."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.engine.gpu_memory import free_memory
from foreword.engine.guessing.draft_profile import unwanted_request
from foreword.engine.guessing.full_drafts import FullDrafts
from foreword.engine.requests.request import Request
from foreword.errors import EngineStopped
from foreword.progress import Progress
from foreword.speculation.drafting import Drafter, choices_of, needs_of
from foreword.speculation.requests import DraftPlan, PassEntry, as_drafter_sees
from foreword.speculation.step import Stepper

_log = logging.getLogger(__name__)

SECONDS = 10.0
"""After so many nothing more is prepared: the rest is captured when it comes."""

MEMORY_SHARE = 0.5
"""Of the device's free memory, what may be used up: prompts and rare passes need some, too."""

MOST_STEPS = 8
"""Of one size: a pass is compiled in its first, captured in its second, and a drafter begins a step later."""

TEMPERATURES = (0.0, 1.0)
"""Where tokens are drawn on the device, a capture is for the one or for the other."""


@dataclass(frozen=True)
class Prepared:
    """What came of it."""

    sizes: int = 0  # that were made ready
    wanted: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class _Case:
    """Steps of one size."""

    requests: int
    length: int
    drafter: Drafter | None  # who guesses; None: nobody
    guesses: int = 0
    depth: int = 0


def prepare_passes(
    core: EngineCore,
    requests: int,
    progress: Progress | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Prepared:
    """Run what the backend asks for, up to so many requests, within a bound of time and memory. The engine is idle.

    What fails here costs a line: a request for which a pass fails is recovered from by itself.
    """
    cases = _cases(core, requests)
    if not cases:
        return Prepared()
    began, free = clock(), free_memory(core.target.device)
    done = 0
    try:
        while done < len(cases) and clock() - began < SECONDS:
            if free_memory(core.target.device) < free * (1 - MEMORY_SHARE):
                break
            if progress is not None:
                progress(done, len(cases))
            _run(core, cases[done])
            done += 1
    except EngineStopped:
        raise
    except torch.OutOfMemoryError:
        _log.warning("no memory is left to prepare more passes: the others are prepared when they come")
        torch.cuda.empty_cache()
    except Exception as error:
        _log.warning("passes could not be prepared: %s: %s", type(error).__name__, error)
    found = Prepared(done, len(cases), clock() - began)
    _log.info("%d of %d sizes of passes were prepared in %.1f s", done, len(cases), found.seconds)
    if progress is not None:
        progress(len(cases), len(cases))
    return found


def _cases(core: EngineCore, requests: int) -> list[_Case]:
    """Short texts first; of those of one length, first without guesses, then with as many as the default asks for."""
    found = _sizes(core, requests, None)
    plan = core.drafters.default
    if plan is not None and plan.max_nodes:
        for drafter in choices_of(plan.drafter).values() or [plan.drafter]:
            found += _sizes(core, requests, plan, drafter)
    return sorted(found, key=lambda case: case.length)


def _sizes(
    core: EngineCore, requests: int, plan: DraftPlan | None, drafter: Drafter | None = None
) -> list[_Case]:
    guesses, depth = (0, 0) if plan is None else (plan.max_nodes, plan.max_depth)
    if plan is not None and plan.max_batch is not None:
        requests = min(requests, plan.max_batch - 1)
    # A drafter that is told of states has to be the one that the plan has; of the others full drafts can be asked.
    if drafter is not None and not needs_of(drafter):
        drafter = FullDrafts(drafter)
    length = core.max_model_len - MOST_STEPS * (1 + depth) - 1
    sizes = core.target.sizes_to_prepare(requests, length, 1 + guesses)
    cases = [_Case(size.requests, size.length, drafter, guesses, depth) for size in sizes]
    return [case for case in cases if _pages(core, case) <= core.cache.free_pages]


def _pages(core: EngineCore, case: _Case) -> int:
    """That its steps need at most: the text is shared."""
    of_one = core.cache.pages_for(MOST_STEPS * (1 + case.depth) + 2 * case.guesses) + 1
    return core.cache.pages_for(case.length) + case.requests * of_one


def _run(core: EngineCore, case: _Case) -> None:
    policy = FixedPolicy() if case.drafter is None else FixedPolicy(case.drafter, case.guesses, case.depth)
    stepper = Stepper(core.runner, core.cache, policy, core.max_rows, store=core.runner.store)
    text = [0] * (case.length + 1)
    source = unwanted_request(core, text)
    made = [source]
    try:
        _take_part(core, source, case)
        while (left := case.length - source.kv.computed) > 0:
            stepper.step([PassEntry.of(source, min(left, core.max_rows))])
        for temperature in TEMPERATURES:
            group = []
            for _ in range(case.requests):
                kv = core.cache.fork(source.kv)
                one = unwanted_request(core, text, number=len(made), temperature=temperature, kv=kv)
                made.append(one)
                group.append(one)
                _take_part(core, one, case)
            _step_until_ready(stepper, group, case, core.steps_ahead)
    finally:
        for request in made:
            core.cache.close(request.kv)
            for drafter in request.asked.values():
                drafter.forget(as_drafter_sees(request))


def _take_part(core: EngineCore, request: Request, case: _Case) -> None:
    """As a request that asks for guesses, or for none; nobody else is to find its text."""
    request.kv.publishes = False
    request.speculation = None if case.drafter is None else core.drafters.default


def _step_until_ready(stepper: Stepper, requests: Sequence[Request], case: _Case, ahead: int) -> None:
    least = 1 if case.drafter is None else 3
    for number in range(MOST_STEPS):
        launched = stepper.launch([_entry(request) for request in requests])
        is_cold = launched.is_cold
        if case.drafter is None and ahead > 1 and number == 0:  # the next one reads what this one draws
            behind = stepper.launch([PassEntry.of(request, 1) for request in requests])
            stepper.resolve(launched)
            launched = behind
        stepper.resolve(launched)
        if number + 1 >= least and not is_cold:
            return


def _entry(request: Request) -> PassEntry:
    return PassEntry.of(request, len(request.tokens) - request.kv.computed)
