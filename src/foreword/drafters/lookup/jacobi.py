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

_BYTES_PER_REQUEST = 3_000  # approximate bytes per request, mostly the random generator


@dataclass
class _NextDraft:
    """The next draft of a request."""

    tokens: list[int] = field(default_factory=list)
    length: int = 0  # tokens of the text before the draft
    random: Random = field(default_factory=lambda: Random(0))  # for positions without a draw


class JacobiDrafter(LookupDrafter[_NextDraft]):
    """Drafts chains; positions without a draw get random tokens of the prompt."""

    traits = READS_DRAWS

    def observe(self, commits: Sequence[Commit]) -> None:
        """Store the target's draws for the positions after the text as the next draft."""
        for commit in commits:
            next_draft = self._known.get(commit.request.request_id)
            if next_draft is not None and len(commit.draft):
                next_draft.tokens = _next_draft(next_draft.tokens, commit)
                next_draft.length = len(commit.request.tokens)

    def memory_bytes(self) -> int:
        return len(self._known) * _BYTES_PER_REQUEST

    def draft(self, task: DraftTask) -> Draft:
        request = task.request
        next_draft = self._known.setdefault(request.request_id, _NextDraft())
        length = min(task.max_nodes, task.max_depth)
        # Tokens committed since then, in passes that did not verify this draft.
        committed = len(request.tokens) - next_draft.length
        del next_draft.tokens[:committed]
        next_draft.length = len(request.tokens)
        prompt_len = request.prompt_len or len(request.tokens)
        while len(next_draft.tokens) < length:
            next_draft.tokens.append(request.tokens[next_draft.random.randrange(prompt_len)])
        return Draft.chain(next_draft.tokens[:length], len(request.tokens), request.epoch)


def _next_draft(drafted: Sequence[int], commit: Commit) -> list[int]:
    """Return the target's draws along the path `drafted`, for the positions after the committed text."""
    judged = JudgedDraft(commit)
    drawn = []
    for length in range(len(drafted) + 1):
        token = judged.drawn_after(judged.follow(drafted[:length]))
        if token is None:
            break
        drawn.append(token)
    return drawn[len(commit.request.tokens) - commit.draft.committed_len :]


KIND = chosen_kind(JacobiDrafter, "drafts the tokens that the target drew for later positions")
