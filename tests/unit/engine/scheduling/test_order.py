"""Who begins first, who gives way, and what nobody can bring about."""

import random
from collections import Counter

import pytest

from foreword.control.service import Service, Slo
from foreword.engine.requests.request import Request
from foreword.engine.scheduling.order import TenantQueues
from helpers.service_world import ServiceWorld

LATENCY = Service("chat", Slo.LATENCY, 3e-3)
THROUGHPUT = Service()
BATCH = Service("nightly", Slo.BATCH)


def finished(world: ServiceWorld, requests: list[Request]) -> list[Request]:
    """All of them, in the order of their ends."""
    done: list[Request] = []
    while len(done) < len(requests):
        world.core.step()
        done += [r for r in requests if r.finish_reason is not None and r not in done]
    return done


def test_a_lower_priority_value_comes_first_and_arrival_decides_between_equals():
    world = ServiceWorld(max_num_seqs=1)
    wanted = [world.ask(Service(priority=p), tokens=2) for p in (5, 0, -3, 0, 7, -3)]
    order = [wanted.index(request) for request in finished(world, wanted)]
    assert order == [2, 5, 1, 3, 0, 4]


def test_of_equals_that_wait_only_the_first_is_compared():
    """Or a long queue would cost its square."""
    world = ServiceWorld(max_num_seqs=1)
    wanted = [world.ask(Service(priority=number % 2), tenant="ab"[number % 3 == 2]) for number in range(40)]
    lines = TenantQueues(wanted)
    assert lines.heads() == [wanted[0], wanted[1], wanted[2], wanted[5]]
    lines.remove_head(wanted[0])
    assert lines.heads() == [wanted[4], wanted[1], wanted[2], wanted[5]]


def test_those_behind_a_request_that_lacks_pages_wait_until_it_has_begun():
    world = ServiceWorld(pages=6, enable_prefix_caching=False)
    running = [world.ask(prompt=[1] * 20, tokens=tokens) for tokens in (6, 9)]
    world.core.step()
    large = world.ask(prompt=[2] * 80, tokens=2)  # all six pages
    small = []
    while any(request.finish_reason is None for request in running):
        small.append(world.ask(prompt=[3], tokens=30))
        world.core.step()
        assert set(small) <= set(world.core.scheduler.waiting), "none of them begins before it"
    world.core.step()
    assert large not in world.core.scheduler.waiting
    assert len(small) > 5
    finished(world, [large, *small])


def test_classes_come_before_priorities():
    world = ServiceWorld(max_num_seqs=1)
    wanted = [
        world.ask(Service("nightly", Slo.BATCH, priority=-100), tokens=2),
        world.ask(Service(priority=-1), tokens=2),
        world.ask(Service("chat", Slo.LATENCY, 1.0, priority=100), tokens=2),
    ]
    assert finished(world, wanted) == wanted[::-1]


def test_a_class_makes_way_for_the_one_before_it_and_ends_with_the_same_text():
    alone = ServiceWorld()
    prompt = [3, 1, 4, 1, 5]
    (expected,) = finished(alone, [alone.ask(BATCH, prompt=prompt, tokens=30)])
    world = ServiceWorld(max_num_seqs=1)
    batch = world.ask(BATCH, prompt=prompt, tokens=30)
    for _ in range(5):
        world.core.step()
    urgent = world.ask(LATENCY, tokens=3)
    world.core.step()
    assert urgent.kv.computed
    assert batch.accounting.preemptions == 1
    assert finished(world, [batch, urgent]) == [urgent, batch]
    assert batch.tokens == expected.tokens
    world.core.check_integrity()


def test_a_class_makes_way_for_pages_too():
    world = ServiceWorld(pages=6, max_num_seqs=4)
    batch = world.ask(BATCH, prompt=40, tokens=30)
    world.core.step()
    urgent = world.ask(LATENCY, prompt=50, tokens=3)
    world.core.step()
    assert batch.accounting.preemptions == 1
    assert finished(world, [batch, urgent]) == [urgent, batch]


def test_equals_never_put_each_other_off():
    world = ServiceWorld(max_num_seqs=1)
    first = world.ask(Service(priority=9), tokens=20)
    world.core.step()
    second = world.ask(Service(priority=-9), tokens=2)
    assert finished(world, [first, second]) == [first, second]
    assert not first.accounting.preemptions


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (1, 7)])
def test_tenants_share_the_places_by_weight(weights: tuple[int, int]):
    world = ServiceWorld(max_num_seqs=8)
    services = {name: Service(weight=w) for name, w in zip("ab", weights, strict=True)}
    for _ in range(40):  # one tenant asks for everything first
        world.ask(services["a"], tenant="a", tokens=5)
    for _ in range(40):
        world.ask(services["b"], tenant="b", tokens=5)
    held: Counter[str] = Counter()
    for _ in range(24):
        world.core.step()
        held.update(request.tenant for request in world.core.scheduler.running)
    share = held["a"] / held.total()
    assert share == pytest.approx(weights[0] / sum(weights), abs=0.13)


def test_a_tenant_gains_nothing_over_others_by_its_priorities():
    world = ServiceWorld(max_num_seqs=2)
    greedy = [world.ask(Service(priority=-100), tenant="a", tokens=4) for _ in range(20)]
    modest = [world.ask(Service(), tenant="b", tokens=4) for _ in range(3)]
    ended = finished(world, [*greedy, *modest])
    assert max(ended.index(request) for request in modest) < 8


def endless(world: ServiceWorld, service: Service, depth: int) -> None:
    """Keep so many of a class waiting."""
    waiting = sum(request.service.name == service.name for request in world.core.scheduler.waiting)
    for _ in range(depth - waiting):
        world.ask(service, prompt=world.rng.randint(1, 20), tokens=world.rng.randint(1, 8), tenant="loud")


@pytest.mark.parametrize("seed", range(12))
def test_nobody_starves(seed: int):
    """Whatever streams in before it, a request of the last class with the worst priority ends."""
    rng = random.Random(seed)
    pages, places = rng.choice((12, 16, 60)), rng.choice((1, 2, 4, 9))
    world = ServiceWorld(seed, pages=pages, max_num_seqs=places, max_num_batched_tokens=rng.choice((16, 64)))
    ageing = rng.choice((0.0, 0.05))
    loud = [Service(s.name, s.slo, s.step_seconds, ageing_seconds=ageing) for s in (LATENCY, THROUGHPUT)]
    poor = Service("nightly", Slo.BATCH, ageing_seconds=ageing, weight=0.01, priority=10**9)
    for service in loud:
        endless(world, service, 3)
    for _ in range(rng.randint(0, 20)):
        world.core.step()
    meek = [world.ask(poor, prompt=rng.randint(1, 60), tokens=rng.randint(1, 20)) for _ in range(3)]
    for _ in range(900):
        for service in loud:
            endless(world, service, 3)
        world.core.step()
        world.core.check_integrity()
        if all(request.finish_reason == "length" for request in meek):
            return
    pytest.fail(f"still waiting: {[len(request.output_ids) for request in meek]}")
