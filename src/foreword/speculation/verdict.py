"""What a step decides about one request."""

from typing import NamedTuple

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.speculation.draft import NO_DRAFT, Draft


class Verdict(NamedTuple):
    """The accepted path through a draft and the tokens that it commits."""

    path: tuple[int, ...] = ()  # accepted nodes, root first
    # The path's tokens, then one of the target's own unless the answer ended before it.
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if the request wants them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt tokens after the scored rows, if wanted
    error: str | None = None  # why the request cannot go on after these tokens, unless they end it
    is_asked: bool = False  # that it cannot is what its own parameters say: nothing went wrong
    poisoned: bool = False  # the pass computed numbers that are none: the rows it wrote must not be reused
    draft: Draft = NO_DRAFT  # what was judged
    draws: tuple[int, ...] = ()  # what the target draws after the text, then after every node; if known

    @property
    def judged(self) -> Draft:
        """The draft as far as anything was found out about it.

        Where the path is not followed by a token of the target's own, the answer ended on it or its last row has no
        numbers: deeper tokens are neither accepted nor rejected.
        """
        if not self.draft.parents or len(self.tokens) > len(self.path):
            return self.draft
        return self.draft.within(len(self.draft), len(self.path))


NOTHING_DRAWN = Verdict()
"""For a prompt chunk that does not reach the prompt's end, and for a request that is gone."""
