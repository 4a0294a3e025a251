"""A session on a node: a request's text, and the draft after it."""

from collections.abc import Sequence
from enum import Enum, auto

from foreword.acceptance.request import DraftSampling
from foreword.cluster.messages import MAX_NODES, Open, SessionDraft
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, Text

_TOKENS_PER_TRY = 64  # minimum number of tokens that a call processes while the drafter is reading a text


class Pace(Enum):
    """Size of the draft that one call of the drafter requests."""

    AT_ONCE = auto()  # a lookup: the whole draft, which costs as much as one level
    LEVELS = auto()  # a model with chains: one level, which is sent immediately
    TREES = auto()  # a model with trees: a whole tree, then a tree after its best leaf


class Session:
    """The committed text of one request, followed by the best path of its draft, as one token list for the drafter.

    *Run-ahead* drafts more levels than the target requested. If the text diverges from the draft, the epoch changes, so
    that the drafter discards its state.
    """

    def __init__(
        self, number: int, opened: Open, sampling: DraftSampling, pace: Pace, max_len: int = 1 << 30
    ) -> None:
        """`number` is the drafter's request id; text and draft together have at most `max_len` tokens."""
        self.number = number
        self.name = opened.session  # the target's number of the session
        self.value = opened.value  # seconds in which the target generates one token
        self.nodes = self.depth = 1  # requested draft size; initially 1, so that the text is processed early
        self.runs_ahead = True  # whether to draft more levels than requested
        self.is_sent = True  # whether the whole draft was sent
        self.heard_at = 0.0  # time of the last message
        self._opened = opened
        self._sampling = sampling
        self._pace = pace
        self._max_len = max_len
        self._written = list(opened.tokens)  # committed tokens, then the best path of the draft
        self.committed = len(opened.tokens)  # number of committed tokens
        self._epoch = 0  # number of times that the text diverged from the draft
        self._tree = Draft(committed_len=self.committed)  # the draft
        self._drafts_sent = 0
        self._tries = 0  # calls without a draft since the text grew

    @property
    def ahead(self) -> int:
        """Number of drafted levels."""
        return self._tree.depth if self._pace is Pace.AT_ONCE else len(self._written) - self.committed

    @property
    def is_prefetch(self) -> bool:
        """Whether the requested draft is complete, so that further levels are run-ahead."""
        return self.ahead >= self.depth

    def follow(self, length: int, tokens: Sequence[int]) -> bool:
        """Extend the text to `length` tokens, the newest of which are `tokens`; return False if some are missing."""
        first = length - len(tokens)  # position of the first of these tokens
        if first > self.committed:
            return False
        new = list(tokens[self.committed - first :]) if first >= 0 else []
        if not new:
            return True
        drafted = self._written[self.committed : length]  # draft tokens at the positions of the new tokens
        if drafted == new[: len(drafted)]:
            self._written += new[len(drafted) :]
            self._tree = self._tree.rebase(Text(self._written, length))
        else:
            self._written = self._written[: self.committed] + new
            self._tree = Draft(committed_len=length)
            self._epoch += 1
        self.committed, self._tries = length, 0
        self.is_sent = False  # every text is answered, even with an empty draft
        return True

    def want(self, nodes: int, depth: int, value: float) -> None:
        """Set the requested draft size and the value of a token."""
        if nodes > self.nodes or depth > self.depth:
            self._tries, self.is_sent = 0, False
        self.nodes, self.depth, self.value = nodes, depth, value

    def next_call(self) -> DraftTask | None:
        """Return the task of the next drafter call; None: the draft is complete, or the drafter has no more."""
        if not self.depth or not self.nodes or self._tries > self._most_tries:
            return None
        # Run-ahead covers a second draft after a fully accepted one, and the target's token between them.
        wanted_levels = 2 * self.depth + 1 if self.runs_ahead else self.depth
        wanted_levels = min(wanted_levels, MAX_NODES, self._max_len - self.committed - 1)
        left = min(wanted_levels - self.ahead, MAX_NODES - len(self._tree))
        if left < 1:
            return None
        if self._pace is Pace.LEVELS:
            return DraftTask(self._request(len(self._written)), 1, 1)
        if self._pace is Pace.TREES:
            nodes = min(self.nodes, MAX_NODES - len(self._tree))
            return DraftTask(self._request(len(self._written)), nodes, min(self.depth, left))
        if self._tries:
            return None  # a lookup has only one draft for a text
        nodes = min(2 * self.nodes + 1 if self.runs_ahead else self.nodes, MAX_NODES)
        return DraftTask(self._request(self.committed), nodes, wanted_levels)

    @property
    def _most_tries(self) -> int:
        """Maximum number of calls without a draft: the drafter may need several to read a long text."""
        return 0 if self._pace is Pace.AT_ONCE else len(self._written) // _TOKENS_PER_TRY + 2

    def grow(self, answer: Draft) -> None:
        """Add the drafter's answer to the draft; an answer of a lookup replaces the draft."""
        if self._pace is Pace.AT_ONCE:
            self._tries += 1
            self._tree, self.is_sent = Draft(answer.tokens, answer.parents, self.committed), False
            return
        if not len(answer) or answer.committed_len != len(self._written):
            self._tries += 1
            # After the last try the draft is complete, and the target must receive it as such.
            self.is_sent = self.is_sent and self._tries <= self._most_tries
            return
        # The answer's nodes follow those of the tree; its roots become children of the best leaf.
        leaf, offset = self._leaf(), len(self._tree)
        parents = [leaf if parent == ROOT else parent + offset for parent in answer.parents]
        tokens = (*self._tree.tokens, *answer.tokens)
        self._tree = Draft(tokens, (*self._tree.parents, *parents), self.committed)
        self._written += _best_path(answer)
        self._tries, self.is_sent = 0, False

    def to_message(self, is_all: bool) -> SessionDraft:
        """Return the whole draft as a message, and record that it is sent; `is_all`: no more levels follow."""
        self._drafts_sent += 1
        self.is_sent = True
        tree = self._tree
        parents = [] if tree.is_chain else list(tree.parents)
        return SessionDraft(self.name, self._drafts_sent, self.committed, is_all, list(tree.tokens), parents)

    def ended(self) -> DraftRequest:
        """Return the request with its committed text, for `Drafter.forget`."""
        return self._request(self.committed)

    def _request(self, length: int) -> DraftRequest:
        """Return the request with the first `length` tokens of `_written` as its text."""
        return DraftRequest(
            self.number,
            Text(self._written, length),
            self._sampling,
            self._opened.prompt_len,
            self._opened.tenant.hex(),
            self._epoch,
            self._opened.prediction,
        )

    def _leaf(self) -> int:
        """Return the node of the last token of `_written`; ROOT if that is committed."""
        node = ROOT
        for token in self._written[self.committed :]:
            children = (n for n, parent in enumerate(self._tree.parents) if parent == node)
            node = next(n for n in children if self._tree.tokens[n] == token)
        return node


def _best_path(draft: Draft) -> list[int]:
    """Return the tokens on the path to the first node of the deepest level."""
    depths = draft.depths()
    node, path = depths.index(max(depths)), []
    while node != ROOT:
        path.append(draft.tokens[node])
        node = draft.parents[node]
    return path[::-1]
