"""Jacobi decoding: drafts the tokens that the target drew while it verified the last draft.

Every pass is one step of a fixed-point iteration over future tokens. Rejected draft tokens are replaced by the
target's draws. Once a token and all tokens before it are correct, it is accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from foreword.drafters.lookup.base import READS_DRAWS, JudgedDraft, LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Commit, DraftTask
from foreword.speculation.settings import DrafterSettings

_BYTES_PER_REQUEST = 3_000  # approximate bytes per request, mostly the random generator


@dataclass
class _Ahead:
    """The draft after a request's text."""

    tokens: list[int] = field(default_factory=list)
    end: int = 0  # length of the text that they follow
    random: Random = field(default_factory=lambda: Random(0))  # for positions without a draw


class JacobiDrafter(LookupDrafter[_Ahead]):
    """Drafts chains; positions without a draw get random tokens of the prompt."""

    traits = READS_DRAWS

    def observe(self, commits: Sequence[Commit]) -> None:
        """Use the target's draws after the new end of the text as the next draft."""
        for commit in commits:
            ahead = self._known.get(commit.request.request_id)
            if ahead is not None and len(commit.draft):
                ahead.tokens = _next_draft(ahead.tokens, commit)
                ahead.end = len(commit.request.tokens)

    def memory_bytes(self) -> int:
        return len(self._known) * _BYTES_PER_REQUEST

    def draft(self, task: DraftTask) -> Draft:
        request = task.request
        ahead = self._known.setdefault(request.request_id, _Ahead())
        length = min(task.max_nodes, task.max_depth)
        del ahead.tokens[: len(request.tokens) - ahead.end]  # committed in passes without this draft
        ahead.end = len(request.tokens)
        sources = request.prompt_len or len(request.tokens)
        while len(ahead.tokens) < length:
            ahead.tokens.append(request.tokens[ahead.random.randrange(sources)])
        return Draft.chain(ahead.tokens[:length], len(request.tokens), request.epoch)


def _next_draft(drafted: Sequence[int], commit: Commit) -> list[int]:
    """Return the draws along the draft, without positions that the text has filled since."""
    judged = JudgedDraft(commit)
    drawn = []
    for length in range(len(drafted) + 1):
        token = judged.drawn_after(judged.follow(drafted[:length]))
        if token is None:
            break
        drawn.append(token)
    return drawn[len(commit.request.tokens) - commit.draft.committed_len :]


KIND = chosen_kind(
    "drafts the tokens that the target drew for later positions",
    DrafterSettings,
    lambda _, __: JacobiDrafter(),
    traits=JacobiDrafter.traits,
)
