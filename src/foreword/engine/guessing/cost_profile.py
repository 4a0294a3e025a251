"""What passes of different sizes cost on this machine, measured when an engine starts and kept for the next one."""

import hashlib
import json
import platform
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import perf_counter

from foreword import __version__
from foreword.control.measured import MeasuredPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.core import EngineCore
from foreword.engine.guessing.draft_profile import begin_with_calls, unwanted_request
from foreword.engine.guessing.kept_estimates import KeptEstimates, write_atomically
from foreword.kernels.native import choose_threads
from foreword.kv.paged_cache import PAGE_SIZE
from foreword.models.sources.builtin import cache_directory
from foreword.speculation.draft import Draft
from foreword.speculation.measured.costs import MOST_ROWS, SLOWEST, StepCosts
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MOST_OF_ONE = 64  # rows of one request
BUDGET_SECONDS = 1.0
REPEATS = 3
CHECKED_ROWS = (1, 2, 4, 8, 16)
CHECK_SECONDS = 0.15  # after which no further round of these begins
MOST_PAGES = 2 * ROWS[-1] // PAGE_SIZE  # with so many, all of them are measured
MOST_COLD = 4  # passes of one size in which something is compiled or captured

Points = list[tuple[float, float]]
"""(rows, seconds)."""


def begin_with_profile(
    core: EngineCore,
    offered: Sequence[SpeculationConfig] = (),
    clock: Callable[[], float] = perf_counter,
) -> None:
    """Give a new engine the cost of its passes, and of the calls of its drafters: the default one and these."""
    _begin_with_profile(core, offered, clock, lambda costs: costs.resembles(check_profile(core, clock)))


def _begin_with_profile(
    core: EngineCore,
    offered: Sequence[SpeculationConfig],
    clock: Callable[[], float],
    are_current: Callable[[StepCosts], bool],
) -> None:
    def kept_at(drafter: str = "") -> Path:
        return cache_directory() / "profiles" / f"{engine_key(core, drafter)}.json"

    saved, trial = _read(kept_at()), StepCosts()
    trial.begin_with(0, saved or [])
    is_current = saved is not None and are_current(trial)
    points = saved if saved is not None and is_current else measure_profile(core, clock)
    if not is_current:
        write_atomically(kept_at(), json.dumps({"points": points}))
    core.situation.costs.begin_with(0, points)
    default = core.drafters.default_config
    known = [*([] if default is None else [default]), *offered]
    changing = [one for one in known if not one.fixed]
    begin_with_calls(core, changing, kept_at, write_atomically, clock, use_saved=is_current)


def begin_with_kept(
    core: EngineCore,
    policy: MeasuredPolicy,
    offered: Sequence[SpeculationConfig] = (),
    clock: Callable[[], float] = perf_counter,
) -> KeptEstimates:
    """Give a new engine what the last one has learned, or else a profile of its passes and drafters.

    Saved costs are used if a few passes of this process confirm them: the machine may have been busy then.
    """
    config = core.drafters.default_config
    drafter = "" if config is None else json.dumps(config.as_mapping(), sort_keys=True)
    path = cache_directory() / "estimates" / f"{engine_key(core, drafter)}.json"
    kept = KeptEstimates(path, policy, core.situation.costs)
    measured = cache(lambda: check_profile(core, clock))  # at most once, and only if something was saved

    def are_current(costs: StepCosts) -> bool:
        return costs.resembles(measured())

    if not kept.load(are_current):
        _begin_with_profile(core, offered, clock, are_current)
    return kept


def measure_profile(core: EngineCore, clock: Callable[[], float] = perf_counter) -> Points:
    """Passes of one request with ever longer drafts, then of several, until the time is up. The engine must be idle."""
    _pass_seconds(core, 1, clock)  # fills caches
    began, points = clock(), []
    for rows in ROWS:
        if min(rows, MOST_OF_ONE) >= core.max_model_len or rows > core.cache.free_pages * PAGE_SIZE // 2:
            break
        times: list[float] = []
        for _ in range(REPEATS + MOST_COLD):
            seconds, is_cold = _pass_seconds(core, rows, clock)
            if is_cold:  # a device is made ready once, and that takes as long as it takes
                began += seconds
            else:
                times.append(seconds)
            if len(times) == REPEATS or clock() - began > BUDGET_SECONDS:
                break
        if times:
            points.append((float(rows), min(times)))
        if clock() - began > BUDGET_SECONDS:
            break
    return points


def check_profile(core: EngineCore, clock: Callable[[], float] = perf_counter) -> Points:
    """Measure a few passes of different sizes, the fastest of each, in turn: a pause then spoils one round alone."""
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
    """Return the seconds of a pass over so many rows, and whether it compiled or captured something."""
    count = -(-rows // MOST_OF_ONE)
    requests = [unwanted_request(core, [0]) for _ in range(count)]
    try:
        entries = [PassEntry.of(request, 1) for request in requests]
        size = core.runner.vocab_size
        draft = Draft.chain([token % size for token in range(1, rows // count)], 1)
        with Transaction(core.cache, entries) as transaction:  # left without commit
            batch = transaction.batch([draft] * count)
            began = clock()
            output = core.runner.forward(batch)
            output.logits[:1, :1].cpu()  # waits for the device; to copy all of them takes longer
            return clock() - began, output.is_cold
    finally:
        for request in requests:
            core.cache.close(request.kv)


def engine_key(core: EngineCore, drafter: str = "") -> str:
    """The same for the same model, and drafter, on the same device with the same program."""
    target = core.target
    facts = (
        __version__,
        repr(target.config),
        type(target).__name__,
        target.weight_bytes,
        str(target.device),
        choose_threads(),
        # Of a smaller engine less can be measured.
        (ROWS[-1], min(core.max_model_len, ROWS[-1]), min(core.cache.pool.num_pages, MOST_PAGES)),
        platform.node(),
        platform.machine(),
        drafter,
    )
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


def _read(path: Path) -> Points | None:
    try:
        found = [(float(rows), float(seconds)) for rows, seconds in json.loads(path.read_text())["points"]]
    except (OSError, ValueError, TypeError, KeyError, OverflowError):
        return None
    is_sound = all(1 <= rows <= MOST_ROWS and 0 < seconds < SLOWEST for rows, seconds in found)
    return found if found and is_sound else None
