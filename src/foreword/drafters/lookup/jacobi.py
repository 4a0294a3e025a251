"""Jacobi decoding: draft what the target drew for the next positions when it verified the last draft.

Every pass is one step of a fixed-point iteration over the tokens to come. Wrong draft tokens are replaced by what
the target draws after them; once a token and all before it are right, it stays and is accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from foreword.drafters.lookup.by_request import LookupDrafter
from foreword.drafters.lookup.judged_draft import READS_DRAWS, JudgedDraft
from foreword.drafters.registry import NoSettings, chosen_kind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, DraftTask

_BYTES_PER_REQUEST = 3_000
"""Memory of one request's draft, most of it the random numbers."""


@dataclass
class _Ahead:
    """The draft after a request's text."""

    tokens: list[int] = field(default_factory=list)
    end: int = 0  # length of the text that they follow
    random: Random = field(default_factory=lambda: Random(0))  # for places that nothing is known of


class JacobiDrafter(LookupDrafter[_Ahead]):
    """Drafts chains; where nothing was drawn yet, of tokens of the prompt."""

    traits = READS_DRAWS

    def observe(self, commits: Sequence[Commit]) -> None:
        """The target's draws from the text's new end on are the next draft."""
        for commit in commits:
            ahead = self._known.get(commit.request.request_id)
            if ahead is not None and len(commit.draft):
                ahead.tokens = _next_draft(ahead.tokens, commit)
                ahead.end = len(commit.request.tokens)

    def memory_bytes(self) -> int:
        """Estimate the memory of all running requests."""
        return len(self._known) * _BYTES_PER_REQUEST

    def draft(self, task: DraftTask) -> Draft:
        """A chain as long as it may be."""
        request = task.request
        ahead = self._known.setdefault(request.request_id, _Ahead())
        length = min(task.max_nodes, task.max_depth)
        del ahead.tokens[: len(request.tokens) - ahead.end]  # what came without a draft of ours
        ahead.end = len(request.tokens)
        sources = request.prompt_len or len(request.tokens)
        while len(ahead.tokens) < length:
            ahead.tokens.append(request.tokens[ahead.random.randrange(sources)])
        return Draft.chain(ahead.tokens[:length], len(request.tokens), request.epoch)


def _next_draft(drafted: Sequence[int], commit: Commit) -> list[int]:
    """Return what was drawn along the draft, without the positions that the text has filled since."""
    judged = JudgedDraft(commit)
    drawn = []
    for length in range(len(drafted) + 1):
        token = judged.drawn_after(judged.follow(drafted[:length]))
        if token is None:
            break
        drawn.append(token)
    return drawn[len(commit.request.tokens) - commit.draft.committed_len :]


KIND = chosen_kind(
    "repeats what the target drew for the places ahead",
    NoSettings,
    lambda _, __: JacobiDrafter(),
    traits=JacobiDrafter.traits,
)
