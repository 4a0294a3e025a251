"""What the latency class is promised holds while four times as much is asked for as there is room for."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from foreword.control.fair_share import FairShare
from foreword.control.fixed import FixedPolicy
from foreword.control.service import Service, Slo, Wish, draft_shares
from foreword.engine.requests.request import Request
from foreword.engine.scheduling.order import shared_rows
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.requests import DraftPlan
from helpers.requests import lone_request
from helpers.service_world import ServiceWorld

LIMIT = 2e-3  # seconds: 10 rows
LATENCY = Service("chat", Slo.LATENCY, LIMIT)
BATCH = Service("nightly", Slo.BATCH, ageing_seconds=0.5)


class Liar(Drafter):
    """As many guesses as it may make, all of them wrong: token 12 is never drawn."""

    def propose(self, asks: list[DraftTask]) -> list[Draft]:
        return [
            Draft.chain([12] * min(ask.max_nodes, ask.max_depth), len(ask.request.tokens), ask.request.epoch)
            for ask in asks
        ]

    def forget(self, request: DraftRequest) -> None:
        pass


@pytest.mark.parametrize("guesses", [0, 6])
def test_under_fourfold_overload_the_latency_class_keeps_its_time_per_token(guesses: int):
    """Room for 16 answers and 10 rows in time; 64 prompts and answers of the batch class are always there."""
    world = ServiceWorld(policy=FixedPolicy(), max_num_seqs=16, max_num_batched_tokens=64)
    plan = DraftPlan("liar", Liar(), guesses, guesses, is_fixed=True) if guesses else None
    nightly: list[Request] = []
    chats: list[Request] = []
    seen: dict[int, list[float]] = {}  # when tokens were there
    for step in range(260):
        while sum(request.finish_reason is None for request in nightly) < 64 and step < 200:
            nightly.append(world.ask(BATCH, prompt=24, tokens=6, plan=plan))
        if step >= 30 and step % 15 == 0:  # when what steps cost is known
            chats.append(world.ask(LATENCY, prompt=20, tokens=20, plan=plan))
        gained = {delta.request_id for delta in world.core.step() if delta.token_ids}
        for request in chats:
            if request.name in gained:
                seen.setdefault(request.request_id, []).append(world.now)
    per_token = [(times[-1] - times[0]) / (len(times) - 1) for times in seen.values() if len(times) > 5]
    assert len(per_token) > 10
    assert max(per_token) <= LIMIT
    learned = list(seen.values())[2:]  # by the first it is seen what short steps cost
    assert max(b - a for times in learned for a, b in pairwise(times)) <= LIMIT
    assert sum(request.finish_reason == "length" for request in chats) >= len(chats) - 3
    assert sum(request.finish_reason == "length" for request in nightly) > 50
    for _ in range(1000):
        world.core.step()
        if not world.core.has_requests:
            break
    assert {request.finish_reason for request in nightly} == {"length"}


def test_others_take_turns_in_a_short_pass():
    urgent = [lone_request([1]) for _ in range(3)]
    others = [lone_request([1]) for _ in range(6)]
    for request in urgent:
        request.service = LATENCY
    taken: dict[int, int] = {}
    for number in range(1, 7):
        runs = shared_rows([*urgent, *others], 5)
        assert all(request.request_id in runs for request in urgent)
        assert len(runs) == 5
        for request in others:
            if request.request_id in runs:
                request.scheduling.last_pass = number
                taken[request.request_id] = taken.get(request.request_id, 0) + 1
    assert set(taken.values()) == {2}


def test_one_row_in_eight_is_for_the_others_however_many_are_urgent():
    urgent = [lone_request([1]) for _ in range(30)]
    others = [lone_request([1]) for _ in range(6)]
    for request in urgent:
        request.service = LATENCY
    runs = shared_rows([*urgent, *others], 16)
    assert len(runs) == 32


def test_guesses_go_first_where_they_buy_latency_then_by_weight():
    heavy, light = Service(weight=3.0), Service(weight=1.0)
    wishes = [Wish(8, "a", heavy), Wish(8, "b", light), Wish(8, "c", LATENCY), Wish(8, "b", light)]
    assert draft_shares(wishes, 100) == [8, 8, 8, 8]
    assert draft_shares(wishes, 6) == [0, 0, 6, 0]
    assert draft_shares(wishes, 16) == [6, 1, 8, 1]
    assert draft_shares(wishes, 0) == [0, 0, 0, 0]


def test_guesses_keep_to_the_step_limit_under_every_policy():
    world = ServiceWorld(policy=FixedPolicy())
    plan = DraftPlan("liar", Liar(), 60, 60, is_fixed=True)
    request = world.ask(replace(LATENCY, step_seconds=math.inf), tokens=60, plan=plan)
    before = world.now
    for _ in range(5):
        world.core.step()
    assert world.now - before > 5 * LIMIT  # it did guess
    request.step_limit = LIMIT
    before = world.now
    for _ in range(5):
        world.core.step()
    assert LIMIT / 2 < (world.now - before) / 5 <= LIMIT * 1.05
    assert isinstance(world.core._policy, FairShare)
