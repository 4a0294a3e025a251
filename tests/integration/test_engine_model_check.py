"""Random worlds around the engine: whatever happens, nothing leaks and every answer is the right one."""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from foreword.speculation.recovery import StepInFlight
from helpers.engine_world import SPECULATIONS, World
from helpers.saboteur import ANOTHER_TRY, STAGES, THE_REQUEST
from helpers.window_drafters import WINDOWS

STEP_LIMIT = 4000
"""Far more steps than any world needs: an engine that hangs fails."""


EVENTS = (
    "overlapping steps",
    "made way",
    "was put off",
    "prefix hits",
    "accepted",
    "stop",
    "length",
    "abort",
    "error",
)
"""What has to happen in a set of worlds, besides the faults."""


def live(world: World, requests: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run a world until all its requests have ended; returns its steps."""
    arrived = steps = 0
    with monkeypatch.context() as patches:
        world.saboteur.infiltrate(world.core, patches)
        while arrived < requests or world.core.has_requests:
            world.is_open = arrived < requests  # later nobody comes any more, or it would never end
            if arrived < requests and world.rng.random() < world.sizes.arrival_share:
                world.arrive(f"request-{arrived}")
                arrived += 1
            one_step(world)
            steps += 1
            assert steps < STEP_LIMIT, "the engine makes no headway"
    return steps


def live_ahead(world: World, requests: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """As `live`, but every step is launched before the last is resolved, also for the same requests if that can be."""
    arrived = steps = lost = 0
    core, rng, saboteur = world.core, world.rng, world.saboteur
    under_way: deque[StepInFlight] = deque()
    with monkeypatch.context() as patches:
        saboteur.infiltrate(core, patches)
        while arrived < requests or core.has_requests or under_way:
            if arrived < requests and rng.random() < world.sizes.arrival_share:
                world.arrive(f"request-{arrived}")
                arrived += 1
            saboteur.arm()
            interfere(world)
            check(world)
            launch_all(world, under_way)
            if under_way:
                report = core.commit(under_way.popleft())
                check(world)
                if (
                    rng.random() < 0.5
                ):  # the books of a step are done when others are under way; nobody leaves then
                    launch_all(world, under_way, interfere=preempt_some)
                lost += world.hear(core.settle(report))
                assert (
                    lost <= saboteur.struck.total()
                )  # which of the steps a fault is for is not told apart here
            saboteur.disarm()
            check(world)
            check_published(world)
            steps += 1
            assert steps < STEP_LIMIT, "the engine makes no headway"
    return steps


def one_step(world: World) -> None:
    """Whatever may happen before a step, during it, and what must hold behind it."""
    rng, core = world.rng, world.core
    if rng.random() < 0.03:
        core.situation.speculating = not core.situation.speculating
    world.saboteur.arm()
    faults = Counter(core.faults)
    interfere(world)
    check(world)
    under_way = core.launch()
    if under_way is None:
        assert not core.has_requests, "requests wait and none is let in"
        world.saboteur.disarm()  # or the next answer would be defined by a judge who fails
        return
    interfere(world)
    check(world)
    second = launch_beside(world)
    lost = world.hear(core.resolve(under_way))
    if second is not None:
        check(world)
        interfere(world)
        lost += world.hear(core.resolve(second))
    assert lost == world.saboteur.losses
    assert all(not core.cache.is_open(kv) for kv in world.saboteur.victims), "another request was given up"
    assert world.saboteur.has_struck or core.faults == faults, f"a fault that nobody planted: {core.faults}"
    world.saboteur.disarm()
    check(world)
    check_told(world)
    check_published(world)


def launch_beside(world: World) -> StepInFlight | None:
    """Now and then a second step, for whoever is not in the first; without faults, whose price is known for one."""
    if world.saboteur.is_at_work or not world.is_open or world.rng.random() < 0.5:
        return None
    world.arrive(f"beside-{len(world.told)}")
    second = world.core.launch()
    world.overlapping += second is not None
    check(world)
    return second


def interfere(world: World) -> None:
    """Users go, and pages are wanted elsewhere, between the halves of a step as well as before them."""
    if world.rng.random() < world.sizes.cancel_share:
        world.cancel()
    preempt_some(world)


def preempt_some(world: World) -> None:
    if world.rng.random() < world.sizes.preempt_share:
        world.preempt()


def launch_all(
    world: World, under_way: deque[StepInFlight], interfere: Callable[[World], None] = interfere
) -> None:
    """As many steps as there may be."""
    while len(under_way) < 2 and (launched := world.core.launch()) is not None:
        world.followed += any(entry.pending for entry in launched.entries)
        under_way.append(launched)
        interfere(world)
        check(world)


def check(world: World) -> None:
    """What holds at any moment."""
    core = world.core
    assert not world.target.contradictions
    assert world.target.most_rows <= world.sizes.max_rows
    core.check_integrity()
    owner: dict[int, str] = {}
    for request in core.scheduler.running:
        for page in request.kv.pages:
            assert owner.setdefault(page, request.tenant) == request.tenant, "two tenants share a page"


def check_told(world: World) -> None:
    """What is told of the engine makes sense."""
    stats = world.core.stats()
    counts = [value for value in vars(stats).values() if isinstance(value, int | float)]
    assert all(count >= 0 for count in counts)
    assert stats.kv_pages_used <= stats.kv_pages
    assert stats.prefix_hits <= stats.prefix_queries
    for drafts, drafted, accepted in stats.acceptance.values():
        assert 0 <= accepted <= drafted
        assert drafts <= drafted


def check_published(world: World) -> None:
    """A page that others may start with holds the rows of its own text, and never those of a guess."""
    memory, size = world.target.memory, world.target.page_size
    for node in world.core.cache._prefix._nodes.values():
        rows = [memory[node.page * size + row][0] for row in range(size)]
        assert rows == list(node.tokens), "a page is published with another text's rows"


def check_end(world: World) -> None:
    """Nothing is held, and everyone got what the definition says, or a beginning of it."""
    cache = world.core.cache
    assert cache.available_pages == cache.pool.num_pages
    assert cache.num_open == 0
    assert world.core.stats().kv_pages_used == 0
    assert not cache.pending_moves
    assert all(not drafter.holds for drafter in world.drafters)
    assert all(not drafter._known for drafter in world.windows)
    for (name, index), told in world.told.items():
        assert told.tokens == told.request.output_ids
        expected, count = told.expected, len(told.tokens)
        assert tuple(told.tokens) == expected.tokens[:count]
        if told.request.params.logprobs is not None:
            assert told.logprobs == pytest.approx(expected.logprobs[:count], abs=1e-4)
        if index == 0 and name in world.prompt_scores and told.tokens:
            assert told.prompt_logprobs == pytest.approx(world.prompt_scores[name], abs=1e-4)
        if told.finish_reason not in ("abort", "error"):
            assert (count, told.finish_reason) == (len(expected.tokens), expected.finish_reason)


def run_worlds(
    seeds: Sequence[int],
    requests: int,
    monkeypatch: pytest.MonkeyPatch,
    speculations: Sequence[Any] = SPECULATIONS,
    way_of_life: Callable[[World, int, pytest.MonkeyPatch], int] = live,
) -> Counter[str]:
    """Many worlds; returns what has happened in them."""
    happened: Counter[str] = Counter()
    for seed in seeds:
        world = World(seed, speculations)
        try:
            happened["steps"] += way_of_life(world, requests, monkeypatch)
            check_end(world)
        except BaseException as error:
            error.add_note(f"in the world of seed {seed}: {world.sizes}")
            raise
        stats = world.core.stats()
        happened["made way"] += stats.preemptions - world.forced
        happened["was put off"] += world.forced
        happened["overlapping steps"] += world.overlapping
        happened["followed"] += world.followed
        happened["prefix hits"] += stats.prefix_hits
        happened["accepted"] += sum(accepted for _, _, accepted in stats.acceptance.values())
        happened.update(f"{told.finish_reason}" for told in world.told.values())
        happened.update(world.saboteur.struck)
    return happened


SEEDS = (4, 9, 10)
"""Of worlds in which most happens. The last sees all mutants that are known but one, which the first sees."""


def test_worlds(monkeypatch: pytest.MonkeyPatch):
    happened = run_worlds(SEEDS, 16, monkeypatch)
    assert happened["steps"] > 300
    for event in (*EVENTS, *STAGES):
        assert happened[event] > 0, f"{event} never happened: {happened}"


AHEAD = (False, False, False, False, {"method": "ngram", "num_speculative_tokens": 5})
"""Most requests decode plainly: nobody may guess while steps are launched ahead."""


def test_worlds_with_steps_ahead(monkeypatch: pytest.MonkeyPatch):
    seeds = (600, 601, 605, 606, 608, 609, 610)
    happened = run_worlds(seeds, 12, monkeypatch, AHEAD, live_ahead)
    assert happened["followed"] > 100
    expected = [event for event in EVENTS if event != "overlapping steps"]
    for event in (*expected, *ANOTHER_TRY, *THE_REQUEST):
        assert happened[event] > 0, f"{event} never happened: {happened}"


def test_worlds_with_windows_beside_the_guesses(monkeypatch: pytest.MonkeyPatch):
    """Lookahead and Jacobi decoding: most of their nodes are wrong, and none may ever be found again."""
    happened = run_worlds((405, 407, 408, 409, 410, 413, 415), 10, monkeypatch, WINDOWS)
    for event in ("was put off", "prefix hits", "accepted", "stop", "abort", "verify", "judge"):
        assert happened[event] > 0, f"{event} never happened: {happened}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_worlds_with_steps_ahead(monkeypatch: pytest.MonkeyPatch):
    happened = run_worlds(range(2000, 2200), 20, monkeypatch, AHEAD, live_ahead)
    assert happened["followed"] > 4000


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_worlds(monkeypatch: pytest.MonkeyPatch):
    happened = run_worlds(range(1000, 1300), 24, monkeypatch)
    assert happened["steps"] > 40_000
    for event in (*EVENTS, *STAGES):
        assert happened[event] > 20, f"{event} hardly happened: {happened}"
