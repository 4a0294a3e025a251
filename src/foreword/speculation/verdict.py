"""What a step decides about one request."""

from dataclasses import dataclass

from foreword.acceptance.logprobs import TokenLogprobs


@dataclass(frozen=True)
class Verdict:
    """The accepted path through a draft and the tokens that it commits."""

    path: tuple[int, ...] = ()  # accepted nodes, root first
    tokens: tuple[
        int, ...
    ] = ()  # their tokens, then one of the target's own unless the answer ended before it
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token if the request wants them
    prompt_logprobs: tuple[
        TokenLogprobs, ...
    ] = ()  # of the prompt tokens behind the rows of this pass, if wanted
    error: str | None = None  # why the request cannot go on behind these tokens, unless they end it
    drafted: int = 0  # nodes that were judged
    depth: int = 0  # levels that the judged draft had
    draft_tokens: tuple[int, ...] = ()  # of the nodes that were judged
    draft_parents: tuple[int, ...] = ()  # of the same nodes, as `Draft` has them


NOTHING_DRAWN = Verdict()
"""For a prompt chunk that does not reach the prompt's end, and for a request that is gone."""
