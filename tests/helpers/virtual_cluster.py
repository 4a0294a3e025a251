"""A target with a draft node in virtual time: the real drafter `remote`, the real desk of a node, their real messages.

Passes, rounds and the way between take the time that is told; nothing depends on how fast this machine is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from random import Random

from foreword.cluster.handshake import PeerIdentity, TokenIds
from foreword.cluster.messages import Close, Commits, Open, SessionDrafts, ToNode, Welcome
from foreword.cluster.node_service import DraftService, NodeLimits
from foreword.cluster.node_session import Pace
from foreword.cluster.remote_drafter import RemoteDrafter
from foreword.cluster.security import Security
from foreword.cluster.settings import RemoteConfig
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask, Text
from helpers.asks import text_request
from helpers.clocks import ScriptedClock

VOCAB = 1000
WRONG = 0  # a token that is never in a text
IDS = TokenIds(VOCAB, lambda token: str(token).encode())
TARGET = "target"


@dataclass(frozen=True)
class Pacing:
    """Seconds, and the chance that a guess is right behind a right text."""

    plain_pass: float
    per_row: float
    level: float
    level_per_request: float
    round_trip: float
    alpha: float


class _Guesser(Drafter):
    """Knows how each text goes on, and says so as often as it is told to."""

    def __init__(self, alpha: float) -> None:
        self._alpha = alpha
        self.asked = 0

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
        self.asked = len(asks)
        return [self._guess(ask.request) for ask in asks]

    def forget(self, request: DraftRequest) -> None:
        """Nothing is kept."""

    def _guess(self, request: DraftRequest) -> Draft:
        place, text = len(request.tokens), request.tokens[0]
        is_right = Random(f"{text}/{place}").random() < self._alpha and WRONG not in request.tokens[-70:]
        return Draft.chain([truth(text, place) if is_right else WRONG], place, request.epoch)


def truth(text: int, place: int) -> int:
    """The token at this place of a text, which is known by its first."""
    return 1 + (7 * text + 13 * place) % (VOCAB - 1)


class VirtualCluster:
    """One target, one node."""

    def __init__(self, pacing: Pacing, batch: int, k: int, runs_ahead: bool) -> None:
        self._pacing, self._k = pacing, k
        self.clock = ScriptedClock()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._heard = False
        config = RemoteConfig("127.0.0.1:1", shadow=0)
        self.remote = RemoteDrafter(config, PeerIdentity(Security(), IDS), self.clock)
        self.remote._arrived.wait = self._wait  # type: ignore[method-assign]
        (self._peer,) = self.remote._peers
        self.remote.came_up(self._peer, self, Welcome(b"", 1, IDS.digest(), "draft_model", 256))  # type: ignore[arg-type]
        self._guesser = _Guesser(pacing.alpha)
        limits = NodeLimits(VOCAB, 1 << 20, runs_ahead=runs_ahead)
        self._desk = DraftService(self._guesser, Pace.LEVELS, limits, self.clock)
        self._mail: list[ToNode] = []
        self._is_drafting = False
        self._texts = [[number + 1] for number in range(batch)]
        first = [text_request(text, vocab_size=VOCAB) for text in self._texts]
        self._requests = [
            DraftRequest(number, Text(text), one.sampling, 1)
            for number, (text, one) in enumerate(zip(self._texts, first, strict=True))
        ]

    def tokens_per_second(self, passes: int, warm: int = 40) -> float:
        """Of all requests, over so many passes after some that do not count."""
        for _ in range(warm):
            self._step()
        began, tokens = self.clock.now, sum(map(len, self._texts))
        for _ in range(passes):
            self._step()
        return (sum(map(len, self._texts)) - tokens) / (self.clock.now - began)

    def send(self, message: ToNode) -> bool:
        """From the target to the node."""
        self._at(self._pacing.round_trip / 2, lambda: self._post(message))
        return True

    def _step(self) -> None:
        requests = [
            DraftRequest(one.request_id, Text(text), one.sampling, 1)
            for one, text in zip(self._requests, self._texts, strict=True)
        ]
        drafts = self.remote.propose([DraftTask(request, self._k, self._k) for request in requests])
        rows = len(drafts) + sum(map(len, drafts))
        self._run(self._pacing.plain_pass + self._pacing.per_row * (rows - 1))
        for text, draft in zip(self._texts, drafts, strict=True):
            for token in (*draft.tokens, None):
                right = truth(text[0], len(text))
                text.append(right)
                if token != right:
                    break

    def _at(self, seconds: float, happen: Callable[[], None]) -> None:
        heappush(self._events, (self.clock.now + seconds, next(self._numbers), happen))

    def _run(self, seconds: float, until_heard: bool = False) -> None:
        """Let time pass, and what happens meanwhile happen."""
        end, self._heard = self.clock.now + seconds, False
        while self._events and self._events[0][0] <= end:
            self.clock.now, _, happen = heappop(self._events)
            happen()
            if until_heard and self._heard:
                return
        self.clock.now = end

    def _wait(self, seconds: float) -> None:
        self._run(seconds, until_heard=True)

    def _post(self, message: ToNode) -> None:
        self._mail.append(message)
        if not self._is_drafting:
            self._draft()

    def _draft(self) -> None:
        """Read the mail, then one round; what is said in it comes out when it ends."""
        for message in self._mail:
            if isinstance(message, Open):
                self._desk.open(TARGET, message)
            elif isinstance(message, Commits):
                for commit in message.commits:
                    self._desk.commit(TARGET, commit)
            elif isinstance(message, Close):
                self._desk.close(TARGET, message)
        self._mail.clear()
        self._guesser.asked = 0
        told = self._desk.round()
        self._is_drafting = bool(told)
        if told:
            asked = self._guesser.asked
            level = self._pacing.level + self._pacing.level_per_request * (asked - 1) if asked else 0.0
            self._at(level, lambda: self._say(SessionDrafts(told[TARGET])))

    def _say(self, guesses: SessionDrafts) -> None:
        if guesses.drafts:
            self._at(self._pacing.round_trip / 2, lambda: self._hear(guesses))
        self._draft()

    def _hear(self, guesses: SessionDrafts) -> None:
        self._heard = True
        self.remote.on_message(self._peer, guesses)
