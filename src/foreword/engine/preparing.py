"""Compiles and captures common passes before the first request."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, product, takewhile
from time import perf_counter
from typing import TYPE_CHECKING, Self

import torch

from foreword.backends.interface import DecodeSize
from foreword.backends.memory import free_memory, release_cached_memory
from foreword.control.fixed import FixedPolicy
from foreword.engine.core import EngineCore
from foreword.engine.profiles import as_prompt_only, placeholder_request
from foreword.engine.requests.request import Request
from foreword.errors import EngineStopped
from foreword.kernels.recording import Variant, recording
from foreword.progress import Progress
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask, all_node_reports
from foreword.speculation.requests import PassEntry
from foreword.speculation.step import Stepper

if TYPE_CHECKING:  # Triton is installed only on GPU machines
    from foreword.backends.cuda.compiling import Kernels


class FullSizeDrafter(Drafter):
    """Wraps a drafter without needs, and replaces drafts that are smaller than requested by arbitrary tokens."""

    def __init__(self, drafter: Drafter | None, *, branches: bool = False) -> None:
        """With `branches` the replacements are trees; without a drafter all drafts are arbitrary tokens."""
        self._drafter = drafter
        self._branches = branches

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        drafts = [Draft()] * len(tasks) if self._drafter is None else self._drafter.propose(tasks)
        return [self._full_size(draft, task) for draft, task in zip(drafts, tasks, strict=True)]

    def forget(self, request: DraftRequest) -> None:
        if self._drafter is not None:
            self._drafter.forget(request)

    def _full_size(self, draft: Draft, task: DraftTask) -> Draft:
        """Return the draft if it has the task's size and shape or is on the device; otherwise arbitrary tokens."""
        depth = min(task.max_nodes, task.max_depth)
        if draft.device is not None or (len(draft) >= depth and draft.is_chain is not self._branches):
            return draft
        text_state = len(task.request.tokens), task.request.epoch
        if not self._branches:
            return Draft.chain([0] * depth, *text_state)
        # A tree: one chain, and the remaining nodes as further children of the root.
        depth = min(depth, task.max_nodes - 1)
        siblings = task.max_nodes - depth
        tokens = (*[0] * depth, *range(1, 1 + siblings))
        chain_parents = range(ROOT, ROOT + depth)
        return Draft(tokens, (*chain_parents, *[ROOT] * siblings), *text_state)


_log = logging.getLogger(__name__)

SECONDS = 5.0  # time limit in seconds; the other passes are compiled and captured on first use
MEMORY_SHARE = 0.5  # fraction of the device's free memory that captured passes may use

MOST_STEPS = 8
"""Maximum steps of a case. The first compiles, the second captures; a drafter with needs must first observe a step."""

PROMPTS = (16, 32, 64, 96, 128, 192, 256, 512)  # prompt lengths that use different kernels

TEMPERATURES = (0.0, 1.0)
"""Greedy and sampled. Sampling needs only one more kernel, so only the first case is prepared for both."""


@dataclass(frozen=True)
class Prepared:
    """Result of `prepare_passes`."""

    cases: int = 0  # number of cases that were prepared
    wanted_cases: int = 0  # number of cases that should have been prepared
    seconds: float = 0.0  # time of the preparation


@dataclass(frozen=True)
class _Mode:
    """A decoding mode: plain, or with drafts of one size."""

    drafter: Drafter | None = None  # None: plain decoding
    draft_tokens: int = 0
    depth: int = 0  # maximum depth of the drafts
    max_requests: int | None = None  # per pass; None: the engine's limit


@dataclass(frozen=True)
class _Case:
    """A kind of pass to prepare: a number of requests, the length of their texts, and a decoding mode."""

    size: DecodeSize  # requests and length
    mode: _Mode


def prepare_passes(
    core: EngineCore,
    requests: int,
    progress: Progress | None = None,
    clock: Callable[[], float] = perf_counter,
) -> Prepared:
    """Prepare the passes that the backend lists, up to `requests` requests, within time and memory limits.

    The engine must be idle. Failures are only logged, since a pass that is not prepared is compiled when it is needed.
    """
    cases = _cases(core, requests)
    if not cases:
        return Prepared()
    began, free = clock(), free_memory(core.target.device)
    done, texts = 0, _PlaceholderTexts(core)  # number of prepared cases
    try:
        needed = _NeededKernels(core.kernels).record(core, cases)
        while done < len(cases) and clock() - began < SECONDS:
            if free_memory(core.target.device) < free * (1 - MEMORY_SHARE):
                break
            if progress is not None:
                progress(done, len(cases))
            # Only the kernels of plain decoding are awaited beyond the time limit: every request needs them.
            if not needed.wait(cases[done], None if done == 0 else began + SECONDS):
                break
            _run(core, cases[done], texts, TEMPERATURES if done == 0 else TEMPERATURES[1:])
            done += 1
    except EngineStopped:
        raise
    except torch.OutOfMemoryError:
        _log.warning("no memory is left to prepare more passes: the others are prepared on first use")
        release_cached_memory()
    except Exception as error:
        _log.warning("passes could not be prepared: %s: %s", type(error).__name__, error)
    finally:
        texts.close()
    prepared = Prepared(done, len(cases), clock() - began)
    _log.info("%d of %d kinds of passes were prepared in %.1f s", done, len(cases), prepared.seconds)
    if progress is not None:
        progress(len(cases), len(cases))
    return prepared


class _NeededKernels:
    """The kernels that the passes of each case need; they are compiled in the background. Empty on a CPU."""

    def __init__(self, kernels: "Kernels | None" = None) -> None:
        self._kernels = kernels
        self._by_case: dict[tuple[_Mode, int], Sequence[Variant]] = {}  # by mode and `DecodeSize.kernels`
        self._prompts: Sequence[Variant] = ()

    def record(self, core: EngineCore, cases: Sequence[_Case]) -> Self:
        """Run the cases without launching kernels, request the kernels that are missing, and return this object."""
        if self._kernels is None:
            return self
        texts = _PlaceholderTexts(core)
        try:
            for case in cases:
                key = case.mode, case.size.kernels
                if key not in self._by_case:
                    temperatures = TEMPERATURES[1:] if self._by_case else TEMPERATURES
                    with recording() as missing:  # kernels are noted, not launched
                        _run(core, case, texts, temperatures, rounds=1)
                    self._by_case[key] = tuple(missing)
                    self._kernels.request(missing)
            with recording() as missing:
                for length in PROMPTS:
                    texts.compute_prompt(length)
            self._prompts = tuple(missing)
            self._kernels.request(missing)
        finally:
            texts.close()
        return self

    @property
    def all(self) -> Sequence["Variant"]:
        """The kernels of all cases and prompts, each once."""
        groups = (*self._by_case.values(), self._prompts)
        return list(dict.fromkeys(variant for group in groups for variant in group))

    def wait(self, case: _Case, until: float | None) -> bool:
        """Wait for the kernels of a case until this time (None: no limit); return whether they are compiled."""
        if self._kernels is None:
            return True
        return self._kernels.wait(self._by_case[case.mode, case.size.kernels], until)


def compile_passes(core: EngineCore, requests: int, progress: Progress) -> int:
    """Compile the kernels of all passes of up to `requests` requests; return how many the process has loaded by then.

    The engine must be idle. Kernels stay in Triton's cache on disk, where later processes find them.
    """
    if core.kernels is None:
        return 0
    needed = _NeededKernels(core.kernels).record(core, _cases(core, requests)).all
    for done, variant in enumerate(needed):
        progress(done, len(needed))
        core.kernels.wait([variant])
    return core.kernels.loaded


def _cases(core: EngineCore, requests: int) -> list[_Case]:
    """Return the cases to prepare that fit into the KV pages, few requests with short texts first."""
    cases = []
    for mode in _modes(core):
        most = requests if mode.max_requests is None else min(requests, mode.max_requests)
        length = core.max_model_len - _added_tokens(mode) - 1
        sizes = core.target.sizes_to_prepare(most, length, 1 + mode.draft_tokens)
        cases += [_Case(size, mode) for size in sizes]
    texts = {(case.size.length, case.mode.drafter is None) for case in cases}  # see `_PlaceholderTexts`
    free_pages = core.cache.free_pages - sum(core.cache.pages_for(length) for length, _ in texts)
    fitting = [case for case in cases if _pages_of(core, case) <= free_pages]
    return sorted(fitting, key=lambda case: case.size.requests * case.size.length)


def _modes(core: EngineCore) -> Iterator[_Mode]:
    """Yield plain decoding, the default draft size, and smaller sizes for a single request."""
    yield _Mode()
    plan, config = core.drafters.default, core.drafters.default_config
    if plan is None or config is None:
        return
    most = None if plan.max_batch is None else plan.max_batch - 1  # drafts while fewer than max_batch run
    for choice in plan.drafter.choices.values() or [plan.drafter]:
        # Drafters on draft nodes are not called: they do not run on this device.
        local = None if all_node_reports([choice]) else choice
        # A drafter with needs must itself observe the passes, and its drafts have full size anyway.
        drafter = choice if choice.traits.needs else FullSizeDrafter(local)
        yield _Mode(drafter, plan.max_nodes, plan.max_depth, most)
        for fewer in takewhile(lambda size: size < plan.max_nodes, (1, 3, 7)):
            yield _Mode(drafter, fewer, min(fewer, plan.max_depth), 1)
        if drafter is not choice and config.makes_trees:
            yield _Mode(FullSizeDrafter(local, branches=True), plan.max_nodes, plan.max_depth, most)


def _added_tokens(mode: _Mode) -> int:
    """Return the maximum number of tokens that the steps in this mode add to a text."""
    return MOST_STEPS * (1 + mode.depth)


def _pages_of(core: EngineCore, case: _Case) -> int:
    """Return the maximum number of KV pages that the requests of a case need besides the shared text."""
    per_request = core.cache.pages_for(_added_tokens(case.mode) + 2 * case.mode.draft_tokens) + 1
    return case.size.requests * per_request


class _PlaceholderTexts:
    """Placeholder texts whose KV is computed once per length; requests fork it."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        # Requests whose text is computed, by its length and whether the default drafter observed it.
        self._sources: dict[tuple[int, bool], Request] = {}
        self._numbers = count()

    def request(self, case: _Case, temperature: float) -> Request:
        """Return a request that continues a placeholder text; the caller ends it."""
        with_drafter = case.mode.drafter is not None
        source = self._source(case.size.length, with_drafter)
        return self._new(source.tokens, with_drafter, temperature, source)

    def end(self, requests: Sequence[Request]) -> None:
        """Close the KV of these requests and let their drafters forget them."""
        for request in requests:
            self._core.cache.close(request.kv)
            for drafter in request.drafter_view.notified.values():
                drafter.forget(as_prompt_only(request))

    def close(self) -> None:
        self.end(list(self._sources.values()))

    def compute_prompt(self, length: int) -> None:
        """Compute and drop a prompt of this length, observed by the default drafter, if there is room for it."""
        core = self._core
        free_rows = core.cache.free_pages * core.cache.page_size
        if length < min(core.max_model_len - 1, core.max_rows + 1, free_rows):
            self._source(length, with_drafter=True)
            self.end([self._sources.pop((length, True))])

    def _source(self, length: int, with_drafter: bool) -> Request:
        """Return the request that owns the text of this length, whose KV is computed on first use."""
        if (length, with_drafter) not in self._sources:
            core, source = self._core, self._new([0] * (length + 1), with_drafter)
            self._sources[length, with_drafter] = source
            stepper = Stepper(core.runner, core.cache, FixedPolicy(), store=core.runner.store)
            while (missing := length - source.kv.computed) > 0:
                stepper.step([PassEntry.of(source, min(missing, core.max_rows))])
        return self._sources[length, with_drafter]

    def _new(
        self, tokens: list[int], with_drafter: bool, temperature: float = 0.0, source: Request | None = None
    ) -> Request:
        """Return a request on a fork of `source`; its KV stays out of the prefix cache."""
        core = self._core
        kv = None if source is None else core.cache.fork(source.kv)
        request = placeholder_request(
            core, tokens, number=next(self._numbers), temperature=temperature, kv=kv
        )
        request.kv.publishes = False
        request.speculation = core.drafters.default if with_drafter else None
        return request


def _run(
    core: EngineCore,
    case: _Case,
    texts: _PlaceholderTexts,
    temperatures: Sequence[float] = TEMPERATURES,
    rounds: int | None = None,
) -> None:
    """Run the passes of a case at each temperature; `rounds` None: as often as its drafter needs."""
    mode = case.mode
    policy = FixedPolicy()
    if mode.drafter is not None:
        policy = FixedPolicy(mode.drafter, mode.draft_tokens, mode.depth)
    stepper = Stepper(core.runner, core.cache, policy, core.max_rows, store=core.runner.store)
    # A head drafts only the first chain of a round in `propose`: one round compiles this, the next captures it.
    rounds = rounds or (2 if _observes(mode) else 1)
    for temperature, _ in product(temperatures, range(rounds)):
        requests: list[Request] = []
        try:
            for _ in range(case.size.requests):
                requests.append(texts.request(case, temperature))
            _step_until_ready(stepper, requests, mode, core.steps_ahead)
        finally:
            texts.end(requests)


def _step_until_ready(stepper: Stepper, requests: Sequence[Request], mode: _Mode, max_in_flight: int) -> None:
    """Run steps until one compiles and captures nothing. `max_in_flight`: passes that the engine has in flight."""
    least = 3 if _observes(mode) else 1
    for number in range(MOST_STEPS):
        launched = stepper.launch(
            [PassEntry.of(request, len(request.tokens) - request.kv.computed) for request in requests]
        )
        is_cold = launched.is_cold
        # The next step reads the token of this one on the device, as with asynchronous scheduling.
        if mode.drafter is None and max_in_flight > 1 and number == 0:
            follower = stepper.launch([PassEntry.of(request, 1) for request in requests])
            stepper.resolve(launched)
            launched = follower
        stepper.resolve(launched)
        if number + 1 >= least and not is_cold:
            return


def _observes(mode: _Mode) -> bool:
    """Return whether the mode's drafter must observe a step before it can draft."""
    return mode.drafter is not None and bool(mode.drafter.traits.needs)
