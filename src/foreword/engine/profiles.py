"""Measures the cost of passes and drafter calls at engine start, or reads saved measurements."""

import hashlib
import json
import logging
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter

from foreword import __version__
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.control.fixed import FixedPolicy
from foreword.control.policy import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.core import EngineCore
from foreword.engine.drafting.saved_estimates import FORMAT, SavedEstimates, write_atomically
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Request, RequestIdentity
from foreword.kernels.native import choose_threads
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.kv.sequence import KvSequence
from foreword.models.sources.builtin import cache_directory
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest
from foreword.speculation.measured.costs import MOST_ROWS, SLOWEST, StepCosts
from foreword.speculation.requests import DraftPlan, PassEntry, draft_request_of
from foreword.speculation.step import Stepper
from foreword.speculation.transaction import Transaction

_log = logging.getLogger(__name__)

DEPTHS = (1, 2, 4, 8)  # draft depths at which drafter calls are measured
ROUNDS = 4  # maximum measurements per depth
CALLS_BUDGET_SECONDS = 0.5  # time limit of the measurements of one drafter

PROMPT = (0, 0, 0, 0)  # token ids of the placeholder text
PLACEHOLDER_TENANT = "unread"  # tenant of placeholder texts; other tenants are hashes of keys, or empty

# Steps before measurements begin: in the first a head has no hidden states of the prompt, the second fills caches.
WARM_UP = 2

Calls = dict[str, list[float]]
"""Cost of a drafter's calls by method, in the format of `CallCost.as_json`."""


def begin_with_calls(
    core: EngineCore,
    configs: Sequence[SpeculationConfig],
    file_of: Callable[[str], Path],
    write: Callable[[Path, str], None],
    clock: Callable[[], float] = perf_counter,
    *,
    use_saved: bool = True,
) -> None:
    """Read the saved call costs of these drafters, or measure and save them.

    `file_of` returns the file for a drafter's settings, given as JSON; `write` saves a text in a file.
    """
    for config in configs:
        path = file_of(json.dumps(config.as_mapping(), sort_keys=True))
        if use_saved and _read_calls(path, core.situation.costs):
            continue
        plan = core.drafters.resolve(config.as_mapping())
        if plan is None:
            continue
        try:
            calls = measure_calls(core, plan, clock)
            core.situation.costs.begin_with_calls(calls)
        except Exception:  # The policy then measures the drafter in use.
            _log.info("the cost of %s was not measured at the start", plan.method, exc_info=True)
            continue
        write(path, json.dumps({"calls": calls}))


def _read_calls(path: Path, costs: StepCosts) -> bool:
    """Restore saved call costs; return whether they were valid."""
    try:
        costs.begin_with_calls(json.loads(path.read_text(encoding="utf-8"))["calls"], are_saved=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return False
    return True


def measure_calls(core: EngineCore, plan: DraftPlan, clock: Callable[[], float] = perf_counter) -> Calls:
    """Measure steps on a placeholder text with increasing draft depth, within the time budget.

    The engine must be idle.
    """
    of_choices = [replace(plan, method=name, drafter=choice) for name, choice in plan.drafter.choices.items()]
    calls: Calls = {}
    for single_plan in of_choices or [plan]:
        calls |= _measure_plan(core, single_plan, clock)
    return calls


def _measure_plan(core: EngineCore, plan: DraftPlan, clock: Callable[[], float]) -> Calls:
    """Measure a plan whose drafter has no choices."""
    stepper = Stepper(core.runner, core.cache, FixedPolicy(), clock=clock, store=core.runner.store)
    request = placeholder_request(core, PROMPT)
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
            report = stepper.step([PassEntry.of(request, run)])
            if report.is_cold:  # compilation happens once and is not limited
                began += report.seconds.total
            if number >= WARM_UP + len(DEPTHS) and clock() - began > CALLS_BUDGET_SECONDS:
                break
    finally:
        core.cache.close(request.kv)
        plan.drafter.forget(as_prompt_only(request))
    calls: Calls = stepper.situation.costs.as_json()["calls"]
    return calls


def as_prompt_only(request: Request) -> DraftRequest:
    """Return the request as drafters see it, with its whole text as prompt, so that no drafter stores an answer."""
    return draft_request_of(request)._replace(prompt_len=len(request.tokens))


def placeholder_request(
    core: EngineCore,
    prompt: Sequence[int],
    *,
    number: int = 0,
    temperature: float = 0.0,
    kv: KvSequence | None = None,
) -> Request:
    """Return a placeholder request for an idle engine, with `kv` or a new KV sequence; the caller closes it."""
    size = core.runner.vocab_size
    params = SamplingParams(temperature=temperature, ignore_eos=True)
    tokens = [token % size for token in prompt]
    sampler = RequestSampler(params, TokenLimits(size), tokens, seed=0)
    limits = RequestLimits(core.max_model_len, frozenset())
    request = Request(number, tokens, params, sampler, limits, RequestIdentity(tenant=PLACEHOLDER_TENANT))
    request.kv = core.cache.open(PLACEHOLDER_TENANT) if kv is None else kv
    return request


ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # sizes of passes to measure
MOST_PER_REQUEST = 64  # maximum rows of one request; more rows are divided between requests
PASSES_BUDGET_SECONDS = 1.0  # time limit of the measurements of passes
REPEATS = 3  # measurements per size; the fastest counts
CHECKED_ROWS = (1, 2, 4, 8, 16)  # sizes that are measured to confirm saved costs
CHECK_SECONDS = 0.15  # no further round of these starts after this time
MOST_PAGES = 2 * ROWS[-1] // PAGE_SIZE  # enough pages to measure all sizes
MOST_COLD = 4  # maximum compiled or captured passes per size

Points = list[tuple[float, float]]
"""The (rows, seconds) of passes."""


def load_or_measure_costs(
    core: EngineCore,
    offered: Sequence[SpeculationConfig] = (),
    clock: Callable[[], float] = perf_counter,
    measured: Callable[[], Points] | None = None,
) -> None:
    """Set the costs of passes and of calls of the default and the offered drafters: saved ones, or measured now.

    Saved costs are used if they resemble those that `measured` returns; by default `check_profile` measures them.
    """

    def file_of(drafter: str = "") -> Path:
        """Return the file of the passes' costs, or of the call costs of a drafter with these settings."""
        return cache_directory() / "profiles" / f"{engine_key(core, drafter)}.json"

    points, trial = _read(file_of()), StepCosts()
    trial.begin_with(0, points or [])
    is_current = points is not None and trial.resembles(
        check_profile(core, clock) if measured is None else measured()
    )
    if points is None or not is_current:
        points = measure_profile(core, clock)
        write_atomically(file_of(), json.dumps({"points": points}))
    core.situation.costs.begin_with(0, points)
    default = core.drafters.default_config
    configs = [*([] if default is None else [default]), *offered]
    adaptive = [config for config in configs if not config.fixed]
    begin_with_calls(core, adaptive, file_of, write_atomically, clock, use_saved=is_current)


def restore_estimates(
    core: EngineCore,
    policy: MeasuredPolicy,
    offered: Sequence[SpeculationConfig] = (),
    clock: Callable[[], float] = perf_counter,
) -> SavedEstimates:
    """Restore the previous engine's estimates and costs, or else load or measure the costs; return the estimates' file.

    Saved costs are used only if a few passes confirm them, since the machine may have been busy.
    """
    config = core.drafters.default_config
    drafter = "" if config is None else json.dumps(config.as_mapping(), sort_keys=True)
    path = cache_directory() / "estimates" / f"{engine_key(core, drafter)}-{FORMAT}.json"
    estimates = SavedEstimates(path, policy, core.situation.costs)
    measured = cache(lambda: check_profile(core, clock))  # at most once, and only if something was saved
    if not estimates.load(lambda costs: costs.resembles(measured())):
        load_or_measure_costs(core, offered, clock, measured)
    return estimates


def measure_profile(core: EngineCore, clock: Callable[[], float] = perf_counter) -> Points:
    """Measure passes of one request with increasing drafts, then of several requests, within the time budget."""
    _pass_seconds(core, 1, clock)  # fills caches
    began, points = clock(), []
    for rows in ROWS:
        is_too_long = min(rows, MOST_PER_REQUEST) >= core.max_model_len
        if is_too_long or rows > core.cache.free_pages * PAGE_SIZE // 2:
            break
        times: list[float] = []
        for _ in range(REPEATS + MOST_COLD):
            seconds, is_cold = _pass_seconds(core, rows, clock)
            if is_cold:  # compilation happens once and is not limited
                began += seconds
            else:
                times.append(seconds)
            if len(times) == REPEATS or clock() - began > PASSES_BUDGET_SECONDS:
                break
        if times:
            points.append((float(rows), min(times)))
        if clock() - began > PASSES_BUDGET_SECONDS:
            break
    return points


def check_profile(core: EngineCore, clock: Callable[[], float] = perf_counter) -> Points:
    """Measure a few sizes in turn, several times, and return the fastest pass of each.

    In turn, so that a pause of the machine affects each size in one round only.
    """
    most = min(core.max_model_len - 1, core.cache.free_pages * PAGE_SIZE // 2)
    sizes = [rows for rows in CHECKED_ROWS if rows <= most]
    fastest: dict[int, float] = {}
    began = clock()
    for _ in range(REPEATS + 1):  # the first round fills caches
        for rows in sizes:
            seconds, is_cold = _pass_seconds(core, rows, clock)
            if not is_cold:
                fastest[rows] = min(seconds, fastest.get(rows, seconds))
        if clock() - began > CHECK_SECONDS:
            break
    return [(float(rows), seconds) for rows, seconds in fastest.items()]


def _pass_seconds(core: EngineCore, rows: int, clock: Callable[[], float]) -> tuple[float, bool]:
    """Return the seconds of a pass over `rows` rows, and whether it compiled or captured a graph."""
    count = -(-rows // MOST_PER_REQUEST)  # requests
    requests = [placeholder_request(core, [0]) for _ in range(count)]
    try:
        entries = [PassEntry.of(request, 1) for request in requests]
        size = core.runner.vocab_size
        draft = Draft.chain([token % size for token in range(1, rows // count)], 1)
        with Transaction(core.cache, entries) as transaction:  # never committed, so it ends with an abort
            batch = transaction.batch([draft] * count)
            began = clock()
            output = core.runner.forward(batch)
            output.logits[:1, :1].cpu()  # wait for the device; copying all logits would take longer
            return clock() - began, output.is_cold
    finally:
        for request in requests:
            core.cache.close(request.kv)


def engine_key(core: EngineCore, drafter: str = "") -> str:
    """Return a hash of model, drafter settings, device and program version, as a file name."""
    target = core.target
    facts = (
        __version__,
        repr(target.config),
        type(target).__name__,
        target.weight_bytes,
        str(target.device),
        choose_threads(),
        # A smaller engine measures fewer sizes.
        (ROWS[-1], min(core.max_model_len, ROWS[-1]), min(core.cache.pool.num_pages, MOST_PAGES)),
        platform.node(),
        platform.machine(),
        drafter,
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> Points | None:
    """Return the saved costs of passes; None if the file is missing or invalid."""
    try:
        points = [(float(rows), float(seconds)) for rows, seconds in json.loads(path.read_text())["points"]]
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    is_valid = all(1 <= rows <= MOST_ROWS and 0 < seconds < SLOWEST for rows, seconds in points)
    return points if points and is_valid else None
