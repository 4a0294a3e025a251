"""Puts an engine's deltas together again."""

from collections.abc import Sequence

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.engine.answers.ends import OpenAnswers
from foreword.engine.answers.outputs import CompletionOutput, Logprob, RequestOutput, TokenAlternatives
from foreword.engine.answers.token_texts import token_text
from foreword.engine.messages import AnswerDelta
from foreword.models.tokenization.tokenizer import Tokenizer


class Answer:
    """One answer as far as it has come."""

    def __init__(self, index: int = 0) -> None:
        self.index = index  # which of the answers to its prompt
        self._texts: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.last = AnswerDelta("", index, "", ())  # has the end, once there is one

    def take(self, delta: AnswerDelta) -> None:
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.last = delta

    @property
    def text(self) -> str:
        return "".join(self._texts)


class OutputCollector:
    """Collects the deltas of one request."""

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_token_ids = list(prompt_token_ids)
        self._params = params
        self._tokenizer = tokenizer
        self._answers = [Answer(index) for index in range(params.n)]
        self._open = OpenAnswers(params.n)

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return not self._open.left

    def take(self, delta: AnswerDelta) -> None:
        """Add what an answer has gained."""
        self._answers[delta.index].take(delta)
        self._open.note(delta)

    def output(self) -> RequestOutput:
        answers = [self._completion(answer) for answer in self._answers]
        scores: list[TokenAlternatives | None] | None = None
        if self._params.prompt_logprobs is not None:
            scores = [None, *self._alternatives(self._answers[0].prompt_logprobs)]
        ids = list(self._prompt_token_ids)
        return RequestOutput(self._prompt, ids, answers, self._request_id, scores)

    def _completion(self, answer: Answer) -> CompletionOutput:
        last = answer.last
        return CompletionOutput(
            index=answer.index,
            text=answer.text,
            token_ids=list(answer.token_ids),
            finish_reason=last.finish_reason,
            seed=last.seed,
            logprobs=None if self._params.logprobs is None else self._alternatives(answer.logprobs),
            error=last.error,
            stop_reason=last.stop_reason,
            stats=last.stats,
        )

    def _alternatives(self, positions: Sequence[TokenLogprobs]) -> list[TokenAlternatives]:
        return [alternatives(found, self._tokenizer) for found in positions]


def alternatives(found: TokenLogprobs, tokenizer: Tokenizer) -> TokenAlternatives:
    """A token's log probability and its competitors' for people to read, the most likely first."""

    def shown(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, token_text(tokenizer, token))

    top = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
    entries = {token: shown(token, value, place + 1) for place, (token, value) in enumerate(top)}
    entries[found.token] = shown(found.token, found.logprob, found.rank)
    return entries
