"""A request as a node knows it, and whom a node drafts for next."""

from dataclasses import replace

import pytest

from foreword.acceptance.request import DraftSampling
from foreword.cluster.framing import ChannelError
from foreword.cluster.messages import (
    Busy,
    Close,
    Lagging,
    Open,
    Sampling,
    SessionCommit,
    decode_sampling,
    encode_sampling,
)
from foreword.cluster.node_service import FORGOTTEN_SECONDS, DraftService, NodeLimits
from foreword.cluster.node_session import Pace, Session
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter
from helpers.asks import text_request
from helpers.clocks import ScriptedClock

VOCAB = 1000


class Counting(Drafter):
    """Guesses that tokens count on, and knows what it was asked; `wide` puts a wrong sibling before each."""

    def __init__(self, wide: bool = False) -> None:
        self.asks: list[tuple[int, list[int], int, int]] = []  # number, text, epoch, levels
        self.forgotten: list[tuple[int, list[int]]] = []
        self._wide = wide

    def propose(self, asks):
        self.asks += [(a.request.request_id, a.request.tokens[:], a.request.epoch, a.max_depth) for a in asks]
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask) -> Draft:
        newest, depth = ask.request.tokens[-1], min(ask.max_depth, ask.max_nodes)
        length, epoch = len(ask.request.tokens), ask.request.epoch
        if not self._wide:
            return Draft.chain([newest + 1 + level for level in range(depth)], length, epoch)
        return Draft((newest + 1, 999), (-1, -1), length, epoch)

    def forget(self, request) -> None:
        self.forgotten.append((request.request_id, request.tokens[:]))


def opened(number: int = 0, tokens=(1, 2, 3), value: float = 0.0) -> Open:
    return Open(number, list(tokens), 2, Sampling(VOCAB), value=value)


def desk_of(drafter, pace: Pace = Pace.LEVELS, **limits) -> DraftService:
    return DraftService(drafter, pace, NodeLimits(VOCAB, 10_000, **limits), ScriptedClock(tick=1e-3))


def drafted(service: DraftService) -> dict[int, list[int]]:
    """Rounds until nothing is left to do; the newest guess of every session."""
    newest: dict[int, list[int]] = {}
    while told_now := service.round():
        newest |= {guess.session: guess.tokens for guesses in told_now.values() for guess in guesses}
    return newest


def test_levels_are_told_as_they_come_and_the_node_runs_ahead():
    service = desk_of(Counting())
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 3, [], 2, 2))
    seen = []
    while told_now := service.round():
        seen += [(guess.tokens, guess.is_all) for guess in told_now["t"]]
    assert seen == [([4, 5, 6, 7, 8][:n], n == 5) for n in range(1, 6)]


def test_a_node_may_be_told_not_to_run_ahead():
    service = desk_of(Counting(), runs_ahead=False)
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 3, [], 2, 2))
    assert drafted(service) == {0: [4, 5]}


def test_the_chain_goes_on_while_it_is_right():
    drafter = Counting()
    service = desk_of(drafter)
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 3, [], 2, 2))
    drafted(service)
    before = len(drafter.asks)
    service.commit("t", SessionCommit(0, 6, [4, 5, 6], 2, 2))
    assert drafted(service) == {0: [7, 8, 9, 10, 11]}
    assert len(drafter.asks) == before + 3  # 7 and 8 were there
    assert {epoch for _, _, epoch, _ in drafter.asks} == {0}


def test_if_the_text_takes_another_way_the_drafter_hears_of_another_epoch():
    drafter = Counting()
    service = desk_of(drafter)
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 3, [], 2, 2))
    drafted(service)
    service.commit("t", SessionCommit(0, 5, [4, 50], 2, 2))
    assert drafted(service) == {0: [51, 52, 53, 54, 55]}
    assert drafter.asks[-1][2] == 1
    assert drafter.asks[-1][1] == [1, 2, 3, 4, 50, 51, 52, 53, 54]


def test_commits_may_come_twice_late_and_not_at_all():
    service = desk_of(Counting())
    service.open("t", opened())
    service.open("t", opened(tokens=[9]))  # the same session again changes nothing
    assert service.commit("t", SessionCommit(0, 5, [4, 5], 1, 1)) is None
    assert service.commit("t", SessionCommit(0, 5, [4, 5], 1, 1)) is None
    assert service.commit("t", SessionCommit(0, 4, [4], 1, 1)) is None
    assert service.commit("t", SessionCommit(0, 6, [3, 4, 5, 6], 1, 1)) is None  # with some that are known
    assert drafted(service) == {0: [7, 8, 9]}
    assert service.commit("t", SessionCommit(0, 9, [9], 1, 1)) == Lagging(0, 6)
    assert service.commit("t", SessionCommit(7, 9, [9], 1, 1)) == Lagging(7, 0)
    assert service.commit("u", SessionCommit(0, 9, [9], 1, 1)) == Lagging(0, 0)  # another target's session


def test_every_text_is_answered_if_only_with_nothing():
    class Silent(Counting):
        def _draft(self, ask) -> Draft:
            return Draft()

    for pace in Pace:
        service = desk_of(Silent(), pace)
        service.open("t", opened())
        service.commit("t", SessionCommit(0, 4, [4], 2, 2))
        told_now = []
        while some := service.round():
            told_now += some["t"]
        assert told_now
        assert told_now[-1].is_all
        assert not told_now[-1].tokens


def test_lookups_are_asked_once_for_everything():
    drafter = Counting()
    service = desk_of(drafter, Pace.AT_ONCE)
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 4, [4], 2, 2))
    assert drafted(service) == {0: [5, 6, 7, 8, 9]}
    service.commit("t", SessionCommit(0, 6, [5, 6], 2, 2))
    assert drafted(service) == {0: [7, 8, 9, 10, 11]}
    assert [text for _, text, _, _ in drafter.asks] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
    ]  # never its own guesses


def test_trees_grow_behind_their_best_leaf():
    service = desk_of(Counting(wide=True), Pace.TREES)
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 3, [], 2, 1))
    (guesses,) = service.round().values()
    assert (guesses[0].tokens, guesses[0].parents) == ([4, 999], [-1, -1])
    (guesses,) = service.round().values()
    assert (guesses[0].tokens, guesses[0].parents) == ([4, 999, 5, 999], [-1, -1, 0, 0])


def test_guesses_end_where_the_model_does():
    service = DraftService(Counting(), Pace.LEVELS, NodeLimits(VOCAB, 6), ScriptedClock(tick=1e-3))
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 3, [], 5, 5))
    assert drafted(service) == {0: [4, 5]}
    service.commit("t", SessionCommit(0, 6, [4, 5, 6], 5, 5))
    assert drafted(service) == {0: []}


def test_whoever_waits_comes_before_what_is_drafted_ahead_and_value_decides():
    drafter = Counting()
    service = desk_of(drafter, batch=1)
    for number, value in enumerate((1.0, 3.0, 2.0)):
        service.open("t", opened(number, [10 * number + 10]))
        service.commit("t", SessionCommit(number, 1, [], 1, 1, value))
    for _ in range(4):
        service.round()
    assert [text[0] for _, text, _, _ in drafter.asks] == [20, 30, 10, 20]


def test_without_room_the_least_valuable_session_goes():
    drafter = Counting()
    service = desk_of(drafter, capacity=2)
    assert service.open("t", opened(0, value=2.0)) == []
    assert service.open("t", opened(1, value=1.0)) == []
    ((target, busy),) = service.open("u", opened(0, value=3.0))
    assert (target, busy.session, len(service)) == ("t", 1, 2)
    ((target, busy),) = service.open("u", opened(1, value=0.5))
    assert isinstance(busy, Busy)
    assert (target, busy.session) == ("u", 1)


def test_what_ends_is_forgotten_with_its_whole_text_and_without_guesses():
    drafter = Counting()
    service = desk_of(drafter)
    service.open("t", opened())
    service.commit("t", SessionCommit(0, 3, [], 2, 2))
    drafted(service)
    service.close("t", Close(0, 5, [4, 60]))
    assert drafter.forgotten == [(0, [1, 2, 3, 4, 60])]
    service.close("t", Close(0))
    assert len(service) == 0


def test_what_goes_is_learned_without_guesses():
    drafter = Counting()
    service = desk_of(drafter)
    service.open("t", opened())
    drafted(service)
    service.close("t", Close(0))
    assert drafter.forgotten == [(0, [1, 2, 3])]


def test_a_target_that_leaves_takes_its_sessions_along():
    service = desk_of(Counting())
    service.open("t", opened(0))
    service.open("u", opened(0))
    service.leave("t")
    assert len(service) == 1
    assert drafted(service) == {0: [4, 5, 6]}


def test_sessions_whose_end_was_lost_are_dropped():
    clock = ScriptedClock()
    service = DraftService(Counting(), Pace.LEVELS, NodeLimits(VOCAB, 100), clock)
    service.open("t", opened(0))
    clock.pass_by(FORGOTTEN_SECONDS + 1)
    service.open("t", opened(1))
    assert len(service) == 1


@pytest.mark.parametrize(
    "message",
    [
        Open(0, [VOCAB], 1, Sampling(VOCAB)),
        Open(0, [1], 1, Sampling(VOCAB), prediction=[VOCAB]),
        Open(0, [1], 1, Sampling(VOCAB, bias_ids=[VOCAB], bias_values=[1.0])),
        Open(0, [1], 1, Sampling(VOCAB, bias_ids=[1])),
        Open(0, [1], 1, Sampling(VOCAB, allowed_ids=[VOCAB])),
        Open(0, [1], 1, Sampling(VOCAB, temperature=float("inf"))),
        Open(0, [1], 1, Sampling(VOCAB, stem=1 << 64)),
        Open(0, [1], 1, Sampling(0)),
    ],
)
def test_what_would_break_the_drafter_for_all_targets_ends_the_connection(message: Open):
    service = desk_of(Counting())
    with pytest.raises(ChannelError):
        service.open("t", message)
    assert len(service) == 0


def test_a_node_draws_with_the_noise_of_the_request():
    record = text_request([1, 2, 3]).sampling.record.copy()
    record["temperature"], record["stem"] = 0.7, 12345
    here = replace(text_request([1, 2, 3]).sampling, record_bytes=record.tobytes())
    there = decode_sampling(encode_sampling(here), 1 << 20)
    assert isinstance(there, DraftSampling)
    assert there.keys(5) == here.keys(5)
    assert there.record["temperature"] == 0.7
    assert there.record["seed"] == 0


def test_a_session_without_a_wish_is_left_alone():
    session = Session(0, opened(), text_request([1]).sampling, Pace.LEVELS)
    session.want(0, 0, 0.0)
    assert session.next_call() is None
