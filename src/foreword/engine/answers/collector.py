"""Puts an engine's deltas together again."""

from collections.abc import Sequence

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.engine.answers.outputs import CompletionOutput, Logprob, RequestOutput, TokenAlternatives
from foreword.engine.messages import AnswerDelta
from foreword.models.tokenization.tokenizer import Tokenizer


class _Answer:
    """One answer as far as it has come."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.last: AnswerDelta | None = None

    def take(self, delta: AnswerDelta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.last = delta


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
        self._answers = [_Answer() for _ in range(params.n)]
        self._prompt_scores: Sequence[TokenLogprobs] = ()

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(a.last is not None and a.last.finish_reason is not None for a in self._answers)

    def take(self, delta: AnswerDelta) -> None:
        """Add what an answer has gained."""
        self._answers[delta.index].take(delta)
        self._prompt_scores = delta.prompt_logprobs or self._prompt_scores

    def output(self) -> RequestOutput:
        """Everything so far."""
        answers = [self._completion(index, answer) for index, answer in enumerate(self._answers)]
        scores: list[TokenAlternatives | None] | None = None
        if self._params.prompt_logprobs is not None:
            scores = [None, *self._alternatives(self._prompt_scores)]
        ids = list(self._prompt_token_ids)
        return RequestOutput(self._prompt, ids, answers, self._request_id, scores)

    def _completion(self, index: int, answer: _Answer) -> CompletionOutput:
        last = answer.last or AnswerDelta(self._request_id, index, "", ())
        return CompletionOutput(
            index=index,
            text="".join(answer.text),
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
        return Logprob(logprob, rank, tokenizer.decode([token], skip_special_tokens=False))

    top = zip(found.top_ids.tolist(), found.top_logprobs.tolist(), strict=True)
    entries = {token: shown(token, value, place + 1) for place, (token, value) in enumerate(top)}
    entries.setdefault(found.token, shown(found.token, found.logprob, found.rank))
    return entries
