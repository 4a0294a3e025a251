"""A request and its state while it is being answered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler
from foreword.drafters.lookup.prediction import count_followed
from foreword.engine.adapters import LoadedAdapter
from foreword.engine.messages import AnswerDelta, DraftShown, RequestStats, sampling_kind
from foreword.engine.requests.accounting import RequestLedger
from foreword.engine.requests.assignment import CanaryPlace
from foreword.engine.text import AnswerText
from foreword.kv.sequence import KvSequence
from foreword.speculation.drafting import Drafter, DraftRequest
from foreword.speculation.measured.acceptance_stats import AcceptanceStats
from foreword.speculation.measured.situation import cohort_name
from foreword.speculation.requests import DraftPlan, Seen
from foreword.speculation.service import DEFAULT_SERVICE, Deadline, Service
from foreword.speculation.verdict import Verdict


@dataclass(frozen=True)
class Identity:
    """Whose answer it is."""

    name: str = ""  # the request's id, as its user knows it
    index: int = 0  # which of the n answers to the same prompt
    tenant: str = ""  # nothing is cached or learned across tenants
    speculation: DraftPlan | None = None  # who drafts for it; None: nobody
    tells_progress: bool = False  # every delta says what the answer has cost so far
    prediction: Sequence[int] = ()  # what its user expects as the answer
    cohort: str = ""  # as the operator's rules name it; empty: by how it draws
    step_limit: float | None = None  # seconds beyond which guesses make no step longer that serves it
    places: Sequence[CanaryPlace] = ()  # its arms in roll-outs
    service: Service = DEFAULT_SERVICE
    adapter: LoadedAdapter | None = None


class Gains:
    """The verdicts of some passes, nearly always of one, taken together."""

    __slots__ = ("drafted", "drafts", "from_draft", "logprobs", "text", "token_ids")

    def __init__(self) -> None:
        self.text = ""
        self.token_ids: tuple[int, ...] = ()
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.drafted = 0  # guesses that were judged
        self.from_draft = 0  # guesses that were committed
        self.drafts: tuple[DraftShown, ...] = ()  # of every pass that brought tokens, if they are shown

    def add(self, verdict: Verdict, text: str, shows: bool) -> None:
        self.text += text
        self.token_ids += verdict.tokens
        self.logprobs += verdict.logprobs
        if verdict.draft.parents:
            self.drafted += len(verdict.judged.parents)
            self.from_draft += len(verdict.path)
        if shows and verdict.tokens:
            draft = verdict.draft
            self.drafts += (DraftShown(draft.tokens, draft.parents, verdict.path, len(verdict.tokens)),)


@dataclass(frozen=True)
class RequestLimits:
    """What ends an answer besides its own parameters."""

    context_length: int  # most positions
    stop_ids: frozenset[int]  # tokens after which it ends
    own_end_ids: frozenset[int] = frozenset()  # of these, the model's own, which need no reason


class _End(NamedTuple):
    """Where in some next tokens the answer ends, and why."""

    kept: int  # tokens that belong to it
    finish_reason: str | None = None
    stop_reason: int | str | None = None


_GOES_ON = _End(-1)
"""It does not, and all of them belong to it."""


class Request:
    """Committed tokens, KV rows and end conditions of one answer."""

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        params: SamplingParams,
        sampler: RequestSampler,
        limits: RequestLimits,
        identity: "Identity | None" = None,
        text: AnswerText | None = None,
    ) -> None:
        identity = identity or Identity()
        self.request_id = request_id
        self.name = identity.name
        self.index = identity.index
        self.leader: Request | None = None  # the first of these answers, whose prompt rows can be copied
        self.tenant = identity.tenant
        self._tells_progress = identity.tells_progress
        self.tokens = list(prompt)
        self.prompt_len = len(prompt)
        self.params = params
        self.sampler = sampler
        self.limits = limits
        self.speculation = identity.speculation
        self.asked: dict[int, Drafter] = {}
        self.seen: tuple[Seen, DraftRequest] | None = None
        self.prediction = identity.prediction
        self.step_limit = identity.step_limit
        self.places = identity.places
        self.service = identity.service
        self.adapter = identity.adapter
        self.adapter_slot = 0 if self.adapter is None else self.adapter.slot
        self.deadline: Deadline | None = None  # of the engine that it is prepared for
        self.served = 0  # the scheduler's newest pass that it took part in
        self.is_aged = False  # it runs, or may run, because it has waited too long
        self.cohort = identity.cohort or sampling_kind(params)
        if self.adapter is not None and not self.cohort.endswith(f"/{self.adapter.name}"):
            self.cohort += f"/{self.adapter.name}"  # guesses fare differently with each
        self.kv = KvSequence()
        self.epoch = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self._asks_too_much = False  # the error is what its own parameters lead to
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_scores: list[TokenLogprobs] = []
        self.ledger = RequestLedger()
        self.kv_bytes_per_row = 0  # of the engine that it is prepared for
        self.acceptance = AcceptanceStats()
        self._text = text
        self._watches = text is not None and text.watches  # whether any text can end it
        self._fresh = Gains()
        self._final_len = min(self.prompt_len + params.max_tokens, limits.context_length)

    @property
    def owner_of_pages(self) -> str:
        """Whose published KV pages it may share: another adapter's hold other numbers for the same tokens."""
        return self.tenant if self.adapter is None else self.adapter.owner_of_pages(self.tenant)

    @property
    def prompt_logprobs(self) -> int | None:
        """Alternatives per prompt token that are wanted; only the first of n answers tells them."""
        return self.params.prompt_logprobs if self.index == 0 else None

    @property
    def scored(self) -> int:
        """Leading prompt tokens whose successors' log probabilities are known."""
        return len(self.prompt_scores)

    @property
    def output_ids(self) -> list[int]:
        """The generated tokens so far."""
        return self.tokens[self.prompt_len :]

    @property
    def lag(self) -> int:
        """Tokens for the next passes: one for a decoding request, which may be a pending one, more for a prompt."""
        return max(len(self.tokens) - self.kv.begin, 1)

    @property
    def can_be_followed(self) -> bool:
        """Whether its next pass can be laid out before the one under way has told its token."""
        draws = self.kv.begin == len(self.tokens)
        return not draws or (self.room > 1 and self.sampler.can_be_followed)

    @property
    def final_len(self) -> int:
        """Most tokens that the request can ever have, prompt included."""
        return self._final_len

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self._final_len - len(self.tokens)

    def kept(self, tokens: Sequence[int]) -> int:
        """How many of these next tokens belong to the answer."""
        return len(tokens) if self._goes_on(tokens) else self._end(tokens).kept

    def commit(self, verdict: Verdict) -> None:
        """Take the tokens of a verdict with all that belongs to them, and note whether the answer has ended."""
        tokens = verdict.tokens
        end = _GOES_ON if self._goes_on(tokens) else self._end(tokens)
        if end is not _GOES_ON and end.kept != len(tokens):
            raise ValueError(f"{len(tokens)} tokens to commit, but the answer ends after {end.kept}")
        before = None if self._text is None else self._text.state()
        try:  # what can fail comes first: if it does, nothing may have changed
            written = self._text_of(tokens, end)
            if tokens:
                self.sampler.commit(tokens)
        except BaseException:
            if self._text is not None and before is not None:
                self._text.go_back(before)
            raise
        self._fresh.add(verdict, written, self._tells_progress)
        self.tokens += tokens
        self.logprobs += verdict.logprobs
        self.prompt_scores += verdict.prompt_logprobs
        self.finish_reason, self.stop_reason = end.finish_reason, end.stop_reason
        if verdict.error is not None and self.finish_reason is None:
            self.fail(verdict.error, verdict.is_asked)

    def fail(self, error: str, is_asked: bool = False) -> None:
        """End the answer with an error."""
        self.finish_reason, self.error, self._asks_too_much = "error", error, is_asked

    def give_up(self, finish_reason: str, why: str) -> None:
        """End the answer with what it has."""
        self.finish_reason, self.error = finish_reason, why

    def preempt(self) -> None:
        """Its KV is gone: whatever was guessed for the old state is stale."""
        self.epoch += 1
        self.kv = KvSequence()
        self.ledger.preemptions += 1

    def take_delta(self) -> AnswerDelta:
        """What the answer has gained since the last call; call it again only when there is more."""
        fresh, self._fresh = self._fresh, Gains()
        is_first = len(self.tokens) - len(fresh.token_ids) == self.prompt_len
        text = fresh.text
        if (
            self.finish_reason is not None
            and self._text is not None
            and not isinstance(self.stop_reason, str)
        ):
            text += self._text.finish()
        return AnswerDelta(
            request_id=self.name,
            index=self.index,
            text=text,
            token_ids=fresh.token_ids,
            logprobs=fresh.logprobs,
            drafted=fresh.drafted,
            from_draft=fresh.from_draft,
            drafts=fresh.drafts,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            asks_too_much=self._asks_too_much,
            seed=self.sampler.seed,
            stats=None if self.finish_reason is None else self.stats(),
            progress=self.stats() if self._tells_progress else None,
            prompt_logprobs=tuple(self.prompt_scores) if is_first else (),
        )

    def stats(self) -> RequestStats:
        """What answering has cost so far."""
        ledger, acceptance = self.ledger, self.acceptance
        spent = ledger.seconds
        # A drafter that was never asked, because guessing is switched off or never paid, did not draft.
        method = self.speculation.method if self.speculation is not None and acceptance.asks else ""
        has_ended = self.prediction and self.finish_reason is not None
        predicted = count_followed(self.prediction, self.output_ids) if has_ended else 0
        thrown_away = acceptance.drafted + acceptance.unjudged - acceptance.accepted
        return RequestStats(
            prompt_tokens=self.prompt_len,
            cached_tokens=ledger.cached_tokens,
            output_tokens=len(self.tokens) - self.prompt_len,
            first_tokens=ledger.first_tokens,
            first_passes=ledger.first_passes or ledger.passes,
            queue_seconds=ledger.queue_seconds,
            prefill_seconds=ledger.prefill_seconds,
            decode_seconds=ledger.decode_seconds,
            draft_seconds=spent.draft,
            verify_seconds=spent.verify,
            accept_seconds=spent.accept,
            passes=ledger.passes,
            asks=acceptance.asks,
            drafts=acceptance.drafts,
            drafted=acceptance.drafted,
            accepted=acceptance.accepted,
            drafted_per_position=tuple(acceptance.drafted_per_position),
            accepted_per_position=tuple(acceptance.accepted_per_position),
            rejected_per_position=tuple(acceptance.rejected_per_position),
            rollback_tokens=thrown_away,
            rejected_kv_bytes=thrown_away * self.kv_bytes_per_row,
            accepted_prediction_tokens=predicted,
            rejected_prediction_tokens=len(self.prediction) - predicted
            if self.finish_reason is not None
            else 0,
            preemptions=ledger.preemptions,
            method=method,
            cohort=cohort_name(method, self.cohort),
            service=self.service.name,
        )

    def _text_of(self, tokens: Sequence[int], end: _End) -> str:
        if self._text is None:
            return ""
        if (
            end.finish_reason == "stop"
            and not isinstance(end.stop_reason, str)
            and not self._keeps_stop_token(end)
        ):
            tokens = tokens[:-1]  # a token that only ends the answer is not part of its text
        return self._text.push_all(tokens)

    def _keeps_stop_token(self, end: _End) -> bool:
        return end.stop_reason is not None and self.params.include_stop_str_in_output

    def _goes_on(self, tokens: Sequence[int]) -> bool:
        """Whether the answer ends nowhere in these next tokens, as far as that is seen at a glance."""
        return (
            not self._watches
            and len(self.tokens) + len(tokens) < self._final_len
            and self.limits.stop_ids.isdisjoint(tokens)
        )

    def _end(self, tokens: Sequence[int]) -> _End:
        """Where in these next tokens the answer ends; at the same token a stop beats a length."""
        watching = self._text.copy() if self._text is not None and self._watches else None
        for count, token in enumerate(tokens, start=1):
            if token in self.limits.stop_ids:
                return _End(count, "stop", None if token in self.limits.own_end_ids else token)
            if watching is not None and (stop := watching.push(token)[1]) is not None:
                return _End(count, "stop", stop)
            if count == self.room:
                return _End(count, "length")
        return _End(len(tokens))
