"""`POST /generate`: one prompt, with the library's field names."""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from foreword.engine.messages import AnswerDelta, RequestStats
from foreword.engine.outputs import Answer, Costs
from foreword.engine.text import TokenTexts, token_text
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.server.api.answer_types import LogprobWriter, PromptLogprobs, extras_of, new_id, usage_of
from foreword.server.api.answering import AnswerJob
from foreword.server.api.entry import AnswerRoute, new_request
from foreword.server.api.request_types import GenerateRequest
from foreword.server.context import ServerContext
from foreword.server.middleware import ApiCaller


class GeneratedAnswer(Struct):
    """An answer; in a stream, what is new of it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    seed: int | UnsetType = UNSET
    logprobs: PromptLogprobs | UnsetType = UNSET  # for each token: token id -> logprob, rank, decoded_token
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    origin: "Origin | UnsetType" = UNSET  # only in streams


class Origin(Struct, frozen=True, omit_defaults=True):
    """Where the new tokens of a stream come from, and speculation figures so far."""

    pieces: list[str]  # text of each token; joined, they are the event's text
    from_draft: int | UnsetType = UNSET  # number of leading tokens that were draft tokens
    passes: list[dict[str, Any]] | UnsetType = UNSET  # passes that committed the tokens
    progress: dict[str, Any] | UnsetType = UNSET


_COUNTED = (
    "output_tokens",
    "passes",
    "drafted",
    "accepted",
    "drafted_per_position",  # drafts that reach the position
    "accepted_per_position",
)
_STAGES = ("decode", "draft", "verify", "accept")  # decode: the time since the first token


def progress_of(stats: RequestStats) -> dict[str, Any]:
    """Return an answer's counts and times so far, in milliseconds."""
    counts = {name: getattr(stats, name) for name in _COUNTED}
    return counts | {f"{stage}_ms": 1e3 * getattr(stats, f"{stage}_seconds") for stage in _STAGES}


def passes_of(tokenizer: Tokenizer, delta: AnswerDelta) -> list[dict[str, Any]]:
    """Return one entry for each target pass: the verified draft tree, and its accepted nodes.

    If the stream has one event for each token, the entry is in the event of the pass's first token.
    """
    return [
        {
            "gained": draft.gained,  # number of committed tokens: the accepted ones, and one of the target
            "guesses": [token_text(tokenizer, token) for token in draft.tokens],  # text of each node
            "parents": draft.parents,  # index of each node's parent; -1: the node follows the committed text
            "accepted": draft.accepted,  # indices of the accepted nodes, in order
        }
        for draft in delta.drafts
    ]


async def generate_job(context: ServerContext, body: GenerateRequest, caller: ApiCaller) -> AnswerJob:
    if isinstance(body.prompt, str):
        ids = await context.prompts.text(body.prompt, body, raw=body.raw)
    else:
        ids = body.prompt
    request = await new_request(context, body, caller, new_id("gen"), ids, progress=body.stream)
    return AnswerJob([request], GenerateDialect(context, body), body.stream)


GENERATE = AnswerRoute(GenerateRequest, generate_job)


class GenerateDialect:
    """Format of `/generate`: texts and token ids."""

    def __init__(self, context: ServerContext, body: GenerateRequest) -> None:
        self._logprobs = LogprobWriter(context.prompts.tokenizer)
        self._wants_logprobs = body.logprobs is not None
        self._show_speculation = context.settings.show_speculation
        self._costs = Costs(body.n or 1)
        self._tokenizer = context.prompts.tokenizer
        self._texts = [TokenTexts(self._tokenizer) for _ in range(body.n or 1)]

    def opening(self) -> Iterable[object]:
        return ()

    def chunk(self, choice: int, delta: AnswerDelta) -> GeneratedAnswer:
        self._costs.note(delta)
        answer = Answer(choice)
        answer.take(delta)
        generated = self._generated(answer)
        generated.origin = self._origin(self._texts[choice].pieces(delta), delta)
        return generated

    def closing(self) -> Iterable[dict[str, Any]]:
        return (self._costs_json(self._costs),)

    def whole(self, answers: Sequence[Answer], costs: Costs) -> dict[str, Any]:
        """Return all answers; fields of the first answer are also at the top level, as in `RequestOutput.as_json`."""
        outputs = [self._generated(answer) for answer in answers]
        top_level = ("text", "token_ids", "finish_reason", "seed")
        first = {name: getattr(outputs[0], name) for name in top_level}
        return first | {"outputs": outputs} | self._costs_json(costs)

    def _origin(self, pieces: list[str], delta: AnswerDelta) -> Origin:
        if not self._show_speculation:
            return Origin(pieces)
        progress = UNSET if delta.progress is None else progress_of(delta.progress)
        return Origin(pieces, delta.from_draft, passes_of(self._tokenizer, delta), progress)

    def _costs_json(self, costs: Costs) -> dict[str, Any]:
        return {"usage": usage_of(costs.total()), **extras_of(costs, self._show_speculation)}

    def _generated(self, answer: Answer) -> GeneratedAnswer:
        last = answer.last
        return GeneratedAnswer(
            answer.index,
            answer.text,
            answer.token_ids,
            last.finish_reason,
            last.stop_reason,
            UNSET if last.finish_reason is None else last.seed,
            # Without the entry of a prompt's first token, which has no log-probability.
            self._logprobs.prompt(answer.logprobs)[1:] if self._wants_logprobs else UNSET,
            self._logprobs.prompt(answer.prompt_logprobs) if answer.prompt_logprobs else UNSET,
        )
