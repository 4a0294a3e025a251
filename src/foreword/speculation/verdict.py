"""The result of a step for one request."""

from typing import NamedTuple

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.speculation.draft import NO_DRAFT, Draft


class Verdict(NamedTuple):
    """The accepted path through a draft, and the tokens to commit."""

    path: tuple[int, ...] = ()  # accepted nodes, root first
    # The path's tokens, then the target's own token unless the answer ended before it.
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if requested
    # of the prompt tokens after the scored rows, if requested
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None  # why the request cannot continue after these tokens, unless they end it
    is_asked: bool = False  # the request's own parameters cause the error; nothing went wrong
    poisoned: bool = False  # the pass computed NaN or infinity: the KV rows it wrote must not be reused
    draft: Draft = NO_DRAFT  # the verified draft
    # the target's token after the text, then after every node; empty if not drawn
    draws: tuple[int, ...] = ()

    @property
    def judged(self) -> Draft:
        """The part of the draft that was accepted or rejected.

        If no token of the target's own follows the path, the answer ended there or its last row is not finite. Deeper
        tokens are then neither accepted nor rejected.
        """
        if not self.draft.parents or len(self.tokens) > len(self.path):
            return self.draft
        return self.draft.within(len(self.draft), len(self.path))


NOTHING_DRAWN = Verdict()
"""Verdict of a prompt chunk before the prompt's end, and of a request that is gone."""
