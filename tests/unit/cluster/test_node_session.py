"""A request as a node knows it, and whom a node drafts for next."""

from dataclasses import replace

import pytest

from foreword.acceptance.request import DraftSampling
from foreword.cluster.framing import ChannelError
from foreword.cluster.messages import (
    Behind,
    Busy,
    Close,
    Commit,
    Open,
    Sampling,
    decode_sampling,
    encode_sampling,
)
from foreword.cluster.node_service import FORGOTTEN_SECONDS, DraftDesk, NodeLimits
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


def desk_of(drafter, pace: Pace = Pace.LEVELS, **limits) -> DraftDesk:
    return DraftDesk(drafter, pace, NodeLimits(VOCAB, 10_000, **limits), ScriptedClock(tick=1e-3))


def drafted(desk: DraftDesk) -> dict[int, list[int]]:
    """Rounds until nothing is left to do; the newest guess of every session."""
    newest: dict[int, list[int]] = {}
    while told_now := desk.round():
        newest |= {guess.session: guess.tokens for guesses in told_now.values() for guess in guesses}
    return newest


def test_levels_are_told_as_they_come_and_the_node_runs_ahead():
    desk = desk_of(Counting())
    desk.open("t", opened())
    desk.commit("t", Commit(0, 3, [], 2, 2))
    seen = []
    while told_now := desk.round():
        seen += [(guess.tokens, guess.is_all) for guess in told_now["t"]]
    assert seen == [([4, 5, 6, 7, 8][:n], n == 5) for n in range(1, 6)]


def test_a_node_may_be_told_not_to_run_ahead():
    desk = desk_of(Counting(), runs_ahead=False)
    desk.open("t", opened())
    desk.commit("t", Commit(0, 3, [], 2, 2))
    assert drafted(desk) == {0: [4, 5]}


def test_the_chain_goes_on_while_it_is_right():
    drafter = Counting()
    desk = desk_of(drafter)
    desk.open("t", opened())
    desk.commit("t", Commit(0, 3, [], 2, 2))
    drafted(desk)
    before = len(drafter.asks)
    desk.commit("t", Commit(0, 6, [4, 5, 6], 2, 2))
    assert drafted(desk) == {0: [7, 8, 9, 10, 11]}
    assert len(drafter.asks) == before + 3  # 7 and 8 were there
    assert {epoch for _, _, epoch, _ in drafter.asks} == {0}


def test_if_the_text_takes_another_way_the_drafter_hears_of_another_epoch():
    drafter = Counting()
    desk = desk_of(drafter)
    desk.open("t", opened())
    desk.commit("t", Commit(0, 3, [], 2, 2))
    drafted(desk)
    desk.commit("t", Commit(0, 5, [4, 50], 2, 2))
    assert drafted(desk) == {0: [51, 52, 53, 54, 55]}
    assert drafter.asks[-1][2] == 1
    assert drafter.asks[-1][1] == [1, 2, 3, 4, 50, 51, 52, 53, 54]


def test_commits_may_come_twice_late_and_not_at_all():
    desk = desk_of(Counting())
    desk.open("t", opened())
    desk.open("t", opened(tokens=[9]))  # the same session again changes nothing
    assert desk.commit("t", Commit(0, 5, [4, 5], 1, 1)) is None
    assert desk.commit("t", Commit(0, 5, [4, 5], 1, 1)) is None
    assert desk.commit("t", Commit(0, 4, [4], 1, 1)) is None
    assert desk.commit("t", Commit(0, 6, [3, 4, 5, 6], 1, 1)) is None  # with some that are known
    assert drafted(desk) == {0: [7, 8, 9]}
    assert desk.commit("t", Commit(0, 9, [9], 1, 1)) == Behind(0, 6)
    assert desk.commit("t", Commit(7, 9, [9], 1, 1)) == Behind(7, 0)
    assert desk.commit("u", Commit(0, 9, [9], 1, 1)) == Behind(0, 0)  # another target's session


def test_every_text_is_answered_if_only_with_nothing():
    class Silent(Counting):
        def _draft(self, ask) -> Draft:
            return Draft()

    for pace in Pace:
        desk = desk_of(Silent(), pace)
        desk.open("t", opened())
        desk.commit("t", Commit(0, 4, [4], 2, 2))
        told_now = []
        while some := desk.round():
            told_now += some["t"]
        assert told_now
        assert told_now[-1].is_all
        assert not told_now[-1].tokens


def test_lookups_are_asked_once_for_everything():
    drafter = Counting()
    desk = desk_of(drafter, Pace.AT_ONCE)
    desk.open("t", opened())
    desk.commit("t", Commit(0, 4, [4], 2, 2))
    assert drafted(desk) == {0: [5, 6, 7, 8, 9]}
    desk.commit("t", Commit(0, 6, [5, 6], 2, 2))
    assert drafted(desk) == {0: [7, 8, 9, 10, 11]}
    assert [text for _, text, _, _ in drafter.asks] == [
        [1, 2, 3, 4],
        [1, 2, 3, 4, 5, 6],
    ]  # never its own guesses


def test_trees_grow_behind_their_best_leaf():
    desk = desk_of(Counting(wide=True), Pace.TREES)
    desk.open("t", opened())
    desk.commit("t", Commit(0, 3, [], 2, 1))
    (guesses,) = desk.round().values()
    assert (guesses[0].tokens, guesses[0].parents) == ([4, 999], [-1, -1])
    (guesses,) = desk.round().values()
    assert (guesses[0].tokens, guesses[0].parents) == ([4, 999, 5, 999], [-1, -1, 0, 0])


def test_guesses_end_where_the_model_does():
    desk = DraftDesk(Counting(), Pace.LEVELS, NodeLimits(VOCAB, 6), ScriptedClock(tick=1e-3))
    desk.open("t", opened())
    desk.commit("t", Commit(0, 3, [], 5, 5))
    assert drafted(desk) == {0: [4, 5]}
    desk.commit("t", Commit(0, 6, [4, 5, 6], 5, 5))
    assert drafted(desk) == {0: []}


def test_whoever_waits_comes_before_what_is_drafted_ahead_and_value_decides():
    drafter = Counting()
    desk = desk_of(drafter, batch=1)
    for number, value in enumerate((1.0, 3.0, 2.0)):
        desk.open("t", opened(number, [10 * number + 10]))
        desk.commit("t", Commit(number, 1, [], 1, 1, value))
    for _ in range(4):
        desk.round()
    assert [text[0] for _, text, _, _ in drafter.asks] == [20, 30, 10, 20]


def test_without_room_the_least_valuable_session_goes():
    drafter = Counting()
    desk = desk_of(drafter, capacity=2)
    assert desk.open("t", opened(0, value=2.0)) == []
    assert desk.open("t", opened(1, value=1.0)) == []
    ((target, busy),) = desk.open("u", opened(0, value=3.0))
    assert (target, busy.session, len(desk)) == ("t", 1, 2)
    ((target, busy),) = desk.open("u", opened(1, value=0.5))
    assert isinstance(busy, Busy)
    assert (target, busy.session) == ("u", 1)


def test_what_ends_is_forgotten_with_its_whole_text_and_without_guesses():
    drafter = Counting()
    desk = desk_of(drafter)
    desk.open("t", opened())
    desk.commit("t", Commit(0, 3, [], 2, 2))
    drafted(desk)
    desk.close("t", Close(0, 5, [4, 60]))
    assert drafter.forgotten == [(0, [1, 2, 3, 4, 60])]
    desk.close("t", Close(0))
    assert len(desk) == 0


def test_what_goes_is_learned_without_guesses():
    drafter = Counting()
    desk = desk_of(drafter)
    desk.open("t", opened())
    drafted(desk)
    desk.close("t", Close(0))
    assert drafter.forgotten == [(0, [1, 2, 3])]


def test_a_target_that_leaves_takes_its_sessions_along():
    desk = desk_of(Counting())
    desk.open("t", opened(0))
    desk.open("u", opened(0))
    desk.leave("t")
    assert len(desk) == 1
    assert drafted(desk) == {0: [4, 5, 6]}


def test_sessions_whose_end_was_lost_are_dropped():
    clock = ScriptedClock()
    desk = DraftDesk(Counting(), Pace.LEVELS, NodeLimits(VOCAB, 100), clock)
    desk.open("t", opened(0))
    clock.pass_by(FORGOTTEN_SECONDS + 1)
    desk.open("t", opened(1))
    assert len(desk) == 1


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
    desk = desk_of(Counting())
    with pytest.raises(ChannelError):
        desk.open("t", message)
    assert len(desk) == 0


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
    assert session.ask() is None
