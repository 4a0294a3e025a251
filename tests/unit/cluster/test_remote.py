"""The drafter `remote` on a scripted clock, with nodes that say what the test says: no socket, no thread, no time."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from foreword.acceptance.rules.rule import Rule
from foreword.cluster.framing import ChannelError
from foreword.cluster.handshake import PeerIdentity, TokenIds
from foreword.cluster.messages import (
    Busy,
    Challenge,
    Close,
    Commits,
    Lagging,
    NodeDrain,
    NodeLoad,
    Open,
    Pong,
    SessionDraft,
    SessionDrafts,
    ToNode,
    Welcome,
    encode_sampling,
)
from foreword.cluster.remote_drafter import RemoteDrafter
from foreword.cluster.security import Security
from foreword.cluster.settings import RemoteConfig
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask
from helpers.asks import text_request
from helpers.clocks import ScriptedClock

VOCAB = 1000
IDS = TokenIds(VOCAB, lambda token: str(token).encode())


class Link:
    """A node's end of a connection."""

    def __init__(self) -> None:
        self.said: list[ToNode] = []

    def send(self, message: ToNode) -> bool:
        self.said.append(message)
        return True

    def of(self, kind: type) -> list:
        return [message for message in self.said if isinstance(message, kind)]


class World:
    """A target with nodes; while it waits, what is planned happens, or time passes."""

    def __init__(self, nodes: int = 1, **settings: object) -> None:
        self.clock = ScriptedClock()
        names = ",".join(f"127.0.0.1:{port}" for port in range(1, nodes + 1))
        config = RemoteConfig(names, **{"shadow": 0, **settings})
        self.drafter = RemoteDrafter(config, PeerIdentity(Security(), IDS), self.clock)
        self.peers = self.drafter._peers
        self.links = [self.connect(place) for place in range(nodes)]
        self.planned: list[tuple[float, Callable[[], None]]] = []
        self.waited: list[float] = []
        self.drafter._arrived.wait = self._wait
        self.texts: dict[int, list[int]] = {}
        self._guesses = 0

    def connect(self, place: int, incarnation: int = 1, **facts: object) -> Link:
        link = Link()
        self.drafter.came_up(
            self.peers[place], link, Welcome(b"", incarnation, IDS.digest(), "ngram", 100, **facts)
        )
        return link

    def _wait(self, seconds: float) -> None:
        self.waited.append(seconds)
        if self.planned and self.planned[0][0] <= seconds:
            after, happens = self.planned.pop(0)
            self.clock.pass_by(after)
            happens()
        else:
            self.clock.pass_by(seconds)
            self.planned = [(after - seconds, happens) for after, happens in self.planned]

    def ask(self, *numbers: int, levels: int = 4) -> list[tuple[int, ...]]:
        """The guesses for these requests, after a pass of 10 ms has taken place."""
        self.clock.pass_by(0.01)
        asks = []
        for number in numbers:
            tokens = self.texts.setdefault(number, [1, 2, 3])
            asks.append(
                DraftTask(text_request(list(tokens), request_id=number, vocab_size=VOCAB), levels, levels)
            )
        return [draft.tokens for draft in self.drafter.propose(asks)]

    def session(self, number: int) -> int:
        return self.drafter._pairings[number].session

    def say(
        self, number: int, tokens: list[int], place: int = 0, is_all: bool = False, length: int | None = None
    ) -> None:
        """A node's guess behind the text that it was told of."""
        self._guesses += 1
        length = self.drafter._pairings[number].sent if length is None else length
        guess = SessionDraft(self.session(number), self._guesses, length, is_all, tokens)
        self.drafter.on_message(self.peers[place], SessionDrafts([guess]))

    def settle(self, number: int = 0, rounds: int = 40) -> None:
        """A node that answers after a millisecond, always rightly, and another token comes behind."""
        for _ in range(rounds):
            newest = self.texts.setdefault(number, [1, 2, 3])[-1]
            right = [newest + step for step in range(1, 5)]
            self.planned = [(0.001, lambda right=right: self.say(number, right, is_all=True))]
            self.ask(number)
            for after, happens in self.planned:  # nobody has waited for it
                self.clock.pass_by(after)
                happens()
            self.planned = []
            self.texts[number] += [*right, (newest + 11) % 900]
        for peer in self.peers:
            peer.waits, peer.wait_seconds = 0, 0.0


def test_a_text_is_told_once_and_then_what_is_new():
    world = World()
    world.ask(0)
    world.texts[0] += [4, 5]
    world.ask(0)
    world.ask(0)  # nothing new
    (opened,) = world.links[0].of(Open)
    assert opened.tokens == [1, 2, 3]
    commits = [message.commits[0] for message in world.links[0].of(Commits)]
    assert [(commit.length, commit.tokens, commit.depth) for commit in commits] == [
        (3, [], 4),
        (5, [4, 5], 4),
    ]


def test_a_prompt_is_told_before_anything_is_asked():
    world = World()
    world.drafter.expect(text_request([1, 2, 3], request_id=0, vocab_size=VOCAB))
    assert len(world.links[0].of(Open)) == 1
    world.say(0, [4])
    assert world.ask(0) == [(4,)]


def test_late_prefetched_and_partial_drafts_are_one_case():
    world = World()
    world.ask(0)
    world.say(0, [4, 5, 6, 7])
    assert world.ask(0) == [(4, 5, 6, 7)]
    world.texts[0] += [4, 5]
    assert world.ask(0) == [(6, 7)]  # it said so before
    world.texts[0] += [6]
    world.say(0, [6, 7, 8], length=5)
    assert world.ask(0) == [(7, 8)]  # for a text that has grown since
    world.texts[0] += [9]
    assert world.ask(0) == [()]  # the text took another way
    world.say(0, [8, 8], length=6)
    assert world.ask(0) == [()]


def test_old_doubled_and_unknown_guesses_are_dropped():
    world = World()
    world.ask(0)
    world.say(0, [4, 5])
    heard = SessionDrafts(
        [SessionDraft(world.session(0), 1, 3, False, [9]), SessionDraft(77, 1, 3, False, [9])]
    )
    world.drafter.on_message(world.peers[0], heard)
    assert world.ask(0) == [(4, 5)]


def test_what_is_no_token_of_the_target_is_cut_off_and_what_is_too_much_too():
    world = World()
    world.ask(0)
    world.say(0, [4, VOCAB, 5])
    assert world.ask(0) == [(4,)]
    world.say(0, list(range(4, 60)))
    assert world.ask(0) == [(4, 5, 6, 7)]


def test_what_is_no_draft_or_no_message_of_a_node_ends_its_connection():
    world = World()
    world.ask(0)
    bad = SessionDrafts([SessionDraft(world.session(0), 5, 3, False, [4, 5], [1, 0])])
    for message in (bad, Challenge(1, b"n" * 32)):
        with pytest.raises(ChannelError):
            world.drafter.on_message(world.peers[0], message)


def test_a_wait_ends_when_the_levels_are_there():
    world = World()
    world.settle()
    newest = world.texts[0][-1]
    world.planned = [
        (0.001, lambda: world.say(0, [newest + 1, newest + 2, newest + 3, newest + 4], is_all=True))
    ]
    assert world.ask(0) == [tuple(range(newest + 1, newest + 5))]
    (node,) = world.drafter.nodes()
    assert node.waits == 1
    assert node.wait_seconds == pytest.approx(0.001)


def test_a_node_that_hangs_costs_one_bounded_wait():
    """However many passes follow: it is not waited for again until something is heard of it."""
    world = World()
    world.settle()
    for _ in range(50):
        assert world.ask(0) == [()]
        world.texts[0] += [7]
    (node,) = world.drafter.nodes()
    assert node.waits == 1
    assert node.wait_seconds <= 3 * 0.0011  # three times what it almost never takes
    assert node.state == "late"
    assert "no answer after" in node.reason
    assert node.trips == 1
    assert world.drafter.fault_counts()["remote/late"] == 1


def test_a_chain_that_stops_growing_is_waited_for_once_until_something_is_heard():
    """Its first level came in time, so that the node is not late; the next ones never come."""
    world = World()
    world.settle()
    world.peers[0].estimates.level_seconds = 0.001
    newest = world.texts[0][-1]
    world.planned = [(0.001, lambda: world.say(0, [newest + 1]))]
    assert world.ask(0) == [(newest + 1,)]
    assert world.peers[0].has_timed_out
    world.waited.clear()
    assert world.ask(0) == [(newest + 1,)]
    assert world.waited == []
    world.say(0, [newest + 1, newest + 2])
    world.ask(0)
    assert world.waited


def test_a_pass_that_had_no_time_to_wait_has_not_waited_in_vain():
    world = World()
    world.settle()
    world.drafter._rate._tokens = 1e12  # nothing is worth a wait
    world.waited.clear()
    world.ask(0)
    assert world.waited == []
    assert not world.peers[0].has_timed_out


def test_it_is_waited_for_again_when_it_answers_in_time():
    world = World()
    world.settle()
    for _ in range(3):
        world.ask(0)
        world.texts[0] += [7]
    world.say(0, [8])  # what it owes comes late
    world.settle(rounds=3)
    newest = world.texts[0][-1]
    world.planned = [(0.001, lambda: world.say(0, [newest + 1] * 4, is_all=True))]
    world.ask(0)
    (node,) = world.drafter.nodes()
    assert node.waits == 1
    assert node.state == "up"


def test_a_node_that_dies_while_it_is_waited_for_ends_the_wait():
    world = World()
    world.settle()
    world.planned = [(0.0005, lambda: world.drafter.went_down(world.peers[0], "it hung up"))]
    assert world.ask(0) == [()]
    (node,) = world.drafter.nodes()
    assert node.state == "down"
    assert node.reason == "it hung up"
    assert node.wait_seconds == pytest.approx(0.0005)
    assert world.ask(0) == [()]
    assert world.drafter.nodes()[0].waits == 1


@pytest.mark.parametrize("fault", ["killed", "hung", "slowed", "partitioned", "replaced"])
def test_whatever_happens_to_a_node_costs_one_bounded_wait_and_then_it_is_used_again(fault: str):
    """A hundred passes of it, as they are counted; what is partitioned is given up after its silence."""
    world = World(shadow=2)
    world.settle()
    late_after = world.peers[0].estimates.late_after
    assert late_after is not None
    if fault in ("killed", "replaced"):
        world.drafter.went_down(world.peers[0], "it hung up")
    if fault == "replaced":
        world.links.append(world.connect(0, incarnation=2))
    for number in range(100):
        if fault == "partitioned" and number == 50:
            world.drafter.went_down(world.peers[0], "nothing was heard of it for 30 s")
        if fault == "slowed":  # twenty times as slow as it was
            world.planned = [(0.02, lambda: world.say(0, [8, 8], is_all=True))]
        world.ask(0)
        for after, happens in world.planned:
            world.clock.pass_by(after)
            happens()
        world.planned = []
        world.texts[0] += [7] * 5
    (node,) = world.drafter.nodes()
    assert node.waits <= 1
    assert node.wait_seconds <= late_after
    if fault in ("killed", "partitioned"):
        world.connect(0, incarnation=2)
    world.clock.pass_by(30.0)
    world.settle(rounds=150)
    newest = world.texts[0][-1]
    world.planned = [(0.001, lambda: world.say(0, [newest + 1] * 4, is_all=True))]
    assert world.ask(0) == [(newest + 1,) * 4]
    (node,) = world.drafter.nodes()
    assert (node.state, node.waits) == ("up", 1)  # full drafting: it is waited for, and its guesses are used


def test_a_text_that_was_read_is_no_answer_to_those_that_are_owed():
    world = World()
    world.settle()
    world.ask(0)
    assert world.drafter.nodes()[0].state == "late"
    world.ask(1)
    world.say(1, [4])  # another request's prompt, read at its leisure
    assert world.drafter.nodes()[0].state == "late"


def test_a_node_that_gives_a_session_up_ends_the_wait_for_it():
    world = World()
    world.settle()
    busy = Busy(world.session(0), 1.0)
    world.planned = [(0.0005, lambda: world.drafter.on_message(world.peers[0], busy))]
    assert world.ask(0) == [()]
    assert world.drafter.nodes()[0].wait_seconds == pytest.approx(0.0005)


def test_a_text_that_is_still_being_read_is_not_waited_for():
    world = World()
    world.settle()
    world.waited.clear()
    world.ask(1)
    world.ask(1)
    assert world.waited == []


def test_a_node_that_joins_is_compared_before_it_is_used_or_waited_for():
    """Its answers come a millisecond after every ask: that is soon enough to be judged, and costs no pass anything."""
    world = World(shadow=3)
    world.ask(0)
    for judged in range(3):
        (node,) = world.drafter.nodes()
        assert (node.state, node.judged) == ("shadow", judged)
        assert world.waited == []
        newest = world.texts[0][-1]
        world.clock.pass_by(0.001)
        world.say(0, [newest + 1, newest + 2], is_all=True)
        world.texts[0] += [newest + 1, newest + 2, newest + 3]
        world.planned = [(0.001, lambda newest=newest: world.say(0, [newest + 4, newest + 5]))]
        expected = (newest + 4, newest + 5) if judged == 2 else ()
        assert world.ask(0) == [expected]
    (node,) = world.drafter.nodes()
    assert (node.state, node.waits, node.acceptance) == ("up", 1, 1.0)


def test_what_a_node_was_told_before_it_guessed_does_not_speak_for_it():
    world = World(shadow=3)
    world.ask(0)
    world.texts[0] += [4, 5]
    world.ask(0)  # so that it knows
    world.say(0, [4, 5, 8], length=3)
    world.texts[0] += [6]
    world.ask(0)
    (node,) = world.drafter.nodes()
    assert (node.judged, node.acceptance) == (1, 0.0)
    world.say(0, [4, 5, 6, 7], length=3)
    world.texts[0] += [7]  # of what came since, it has guessed all
    world.ask(0)
    (node,) = world.drafter.nodes()
    assert node.judged == 2
    assert node.acceptance == pytest.approx(0.5, abs=0.01)


def test_a_node_that_was_never_asked_is_not_late():
    for shadow, state in ((8, "shadow"), (0, "up")):
        (node,) = World(shadow=shadow).drafter.nodes()
        assert (node.state, node.reason) == (state, "nothing heard of it yet")


def test_a_restarted_node_is_in_the_shadow_again_and_a_reconnected_one_is_not():
    world = World(shadow=2)
    world.settle(rounds=6)
    assert world.drafter.nodes()[0].state == "up"
    world.drafter.went_down(world.peers[0], "gone")
    world.connect(0, incarnation=1)
    assert world.drafter.nodes()[0].judged > 2
    world.drafter.went_down(world.peers[0], "gone")
    world.connect(0, incarnation=2)
    assert world.drafter.nodes()[0].judged == 0


def test_requests_of_a_node_that_leaves_get_other_homes_little_by_little():
    world = World(nodes=2)
    world.ask(*range(40))
    before = [node.homes for node in world.drafter.nodes()]
    assert sum(before) == 40
    assert min(before) > 5
    world.drafter.went_down(world.peers[0], "gone")
    world.ask(*range(40))
    assert world.drafter.nodes()[1].homes == before[1] + 1  # the rest goes without for now
    for _ in range(30):
        world.clock.pass_by(1.0)
        world.ask(*range(40))
    assert world.drafter.nodes()[1].homes == 40


def test_a_node_that_drains_gets_no_new_requests_and_loses_the_others():
    world = World(nodes=2)
    world.ask(*range(10))
    world.drafter.on_message(world.peers[0], NodeDrain())
    assert world.drafter.nodes()[0].state == "draining"
    for _ in range(20):
        world.clock.pass_by(1.0)
        world.ask(*range(12))
    assert [node.homes for node in world.drafter.nodes()] == [0, 12]
    assert len(world.links[0].of(Close)) == len(world.links[0].of(Open))


def test_a_busy_node_is_left_alone_for_a_while():
    world = World()
    world.ask(0)
    world.drafter.on_message(world.peers[0], Busy(world.session(0), 5.0))
    world.clock.pass_by(4.0)
    world.ask(0)
    assert len(world.links[0].of(Open)) == 1
    world.clock.pass_by(2.0)
    world.ask(0)
    assert len(world.links[0].of(Open)) == 2


def test_what_a_node_has_missed_is_told_again():
    world = World()
    world.ask(0)
    world.texts[0] += [4, 5, 6]
    world.ask(0)
    world.drafter.on_message(world.peers[0], Lagging(world.session(0), 4))
    world.ask(0)
    assert world.links[0].of(Commits)[-1].commits[0].tokens == [5, 6]
    world.drafter.on_message(world.peers[0], Lagging(world.session(0), 0))
    world.ask(0)
    first, second = world.links[0].of(Open)
    assert second.session == first.session
    assert second.tokens == [1, 2, 3, 4, 5, 6]


def test_a_full_node_is_no_home():
    world = World(nodes=2)
    world.drafter.on_message(world.peers[0], NodeLoad(100, 100, 0.001, 1.0))
    world.drafter.on_message(world.peers[0], Pong(1))
    world.ask(*range(10))
    assert [node.homes for node in world.drafter.nodes()] == [0, 10]


def test_texts_of_local_tenants_are_told_to_nobody():
    world = World(local_tenants="bank-*")
    request = text_request([1, 2, 3], tenant="bank-7", vocab_size=VOCAB)
    world.drafter.expect(request)
    assert world.drafter.propose([DraftTask(request, 4, 4)])[0].tokens == ()
    assert not world.links[0].said


def test_near_nodes_are_homes_first():
    world = World(nodes=2, labels="host=h,zone=z")
    world.connect(0, labels={"host": "other", "zone": "z"})
    world.connect(1, labels={"host": "h", "zone": "z"})
    world.ask(*range(10))
    assert [node.homes for node in world.drafter.nodes()] == [0, 10]


def test_what_ends_leaves_nothing():
    world = World()
    world.ask(0, 1)
    world.texts[0] += [4]
    for number in (0, 1):
        world.drafter.forget(text_request(world.texts[number], request_id=number, vocab_size=VOCAB))
    assert world.drafter.nodes()[0].homes == 0
    assert not world.drafter._pairings
    assert not world.drafter._sessions
    closed = world.links[0].of(Close)
    assert [(one.length, one.tokens) for one in closed] == [(4, [4]), (0, [])]


def test_another_epoch_is_another_session():
    world = World()
    world.ask(0)
    old = world.session(0)
    request = text_request([1, 2, 3], request_id=0, vocab_size=VOCAB, epoch=1)
    world.drafter.propose([DraftTask(request, 4, 4)])
    assert world.session(0) != old
    world.drafter.on_message(world.peers[0], SessionDrafts([SessionDraft(old, 9, 3, False, [9])]))
    assert world.drafter.propose([DraftTask(request, 4, 4)])[0].tokens == ()


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule is not Rule.COUPLED])
def test_rules_that_a_node_could_bias_tell_it_nothing_of_their_noise(rule: Rule):
    """Who knows the numbers that guesses are judged by could choose what is accepted."""
    record = text_request([1]).sampling.record.copy()
    record["temperature"], record["stem"], record["seed"] = 0.7, 99, 5
    sampling = replace(text_request([1]).sampling, record_bytes=record.tobytes())
    other = replace(sampling, rule=rule)
    assert (encode_sampling(other).temperature, encode_sampling(other).stem) == (0.0, 0)
    assert (encode_sampling(sampling).temperature, encode_sampling(sampling).stem) == (0.7, 99)


def test_it_is_absent_while_no_node_is_there_whose_guesses_are_used():
    world = World(2, shadow=1)
    assert world.drafter.absent == ("remote",)  # both are in the shadow
    for peer in world.peers:
        peer.estimates.judged = 1
    assert world.drafter.absent == ()
    world.drafter.went_down(world.peers[0], "killed")
    assert world.drafter.absent == ()
    world.drafter.went_down(world.peers[1], "killed")
    assert world.drafter.absent == ("remote",)


def test_nothing_is_told_of_a_node_that_was_not_measured():
    world = World()
    (report,) = world.drafter.nodes()
    assert (report.first_ms, report.acceptance) == (None, None)
    world.peers[0].estimates.judge(Draft.chain([7], 3), [7])
    world.peers[0].estimates.record_first(0.002)
    (report,) = world.drafter.nodes()
    assert (report.first_ms, report.acceptance) == (2.0, 1.0)
    world.drafter.went_down(world.peers[0], "killed")
    (report,) = world.drafter.nodes()
    assert (report.first_ms, report.acceptance, report.judged) == (None, None, 0)


def test_a_node_that_is_taken_off_the_list_loses_its_requests_and_is_told_of_no_more():
    world = World(2)
    for number in range(4):
        world.ask(number)
    gone = next(peer for peer in world.peers if peer.assigned)
    world.drafter.left(gone)
    assert [report.address for report in world.drafter.nodes()] == [
        peer.name for peer in world.peers if peer is not gone
    ]
    world.clock.pass_by(100)
    for number in range(4):
        world.clock.pass_by(100)
        world.ask(number)
    (left,) = world.drafter.nodes()
    assert left.homes == 4
