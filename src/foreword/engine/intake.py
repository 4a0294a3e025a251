"""Validates a new request and creates one `Request` per answer."""

import itertools
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.engine.adapters import Adapters
from foreword.engine.drafting.drafter_pool import DrafterPool
from foreword.engine.drafting.known_answers import AnswerHints
from foreword.engine.messages import NewRequest
from foreword.engine.policy.controller import PolicyFileController
from foreword.engine.requests.answer import RequestLimits
from foreword.engine.requests.request import Assignment, Request, RequestIdentity
from foreword.engine.scheduling.order import ON_DEADLINE
from foreword.engine.text import Vocabulary
from foreword.errors import RequestError, refusing
from foreword.structured.compiler import Grammars
from foreword.structured.state import GrammarState
from foreword.structured.thinking import AnswerState, ThinkingState

MOST_DEADLINE_MS = 1e12  # upper limit of a deadline in milliseconds (30 years)


@dataclass(frozen=True)
class Intake:
    """Checks a request against the model, and creates one `Request` per answer."""

    vocabulary: Vocabulary
    context_length: int
    rule: Rule
    drafters: DrafterPool
    check: Callable[[Request], None]  # raises `RequestError` for a request that can never run
    adapters: Adapters
    _numbers: "itertools.count[int]"  # ids of the requests within this engine
    grammars: Grammars
    policy_file: PolicyFileController | None = None  # None: requests choose their drafters themselves

    def admit(self, new: NewRequest, assigned: Assignment | None = None) -> list[Request]:
        """Return one `Request` per answer, and count them as users of their adapter.

        The drafter follows from the policy file and the request, unless it is `assigned`. Raise `RequestError` if the
        request is invalid.
        """
        self._check_prompt(new.prompt_token_ids)
        _check_service(new)
        self._check_ids(new.prediction, "prediction")
        params = new.params
        # A JavaScript client reads integers exactly only up to 53 bits.
        seed = secrets.randbits(53) if params.seed is None else params.seed
        end_ids = self.vocabulary.end_ids
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else end_ids)
        # A requested stop token is reported as stop reason
        eos_ids = end_ids - frozenset(params.stop_token_ids)
        limits = RequestLimits(self.context_length, stop_ids, eos_ids)
        token_limits = TokenLimits(
            self.vocabulary.size, tuple(end_ids), self.vocabulary.bad_word_ids(params.bad_words)
        )
        prompt, prediction = new.prompt_token_ids, new.prediction[: self.context_length]
        assigned = assigned or self._assign(new)
        assigned = replace(assigned, service=replace(assigned.service, priority=new.priority))
        adapter = self.adapters.find(new.adapter)
        requests = []
        for index, grammar in enumerate(self._grammar_states(new)):
            sampler = RequestSampler(
                params, token_limits, prompt, seed, sample=index, rule=self.rule, grammar=grammar
            )
            identity = RequestIdentity(
                new.request_id, index, new.tenant, new.progress, prediction, adapter, assigned
            )
            text = self.vocabulary.answer_text(params, prompt)
            requests.append(Request(next(self._numbers), prompt, params, sampler, limits, identity, text))
        self.check(requests[0])
        for request in requests[1:]:
            request.scheduling.leader = requests[0]
        self.adapters.hold(adapter, len(requests))
        return requests

    def is_prepared_for(self, new: NewRequest) -> bool:
        """Return whether `admit` would create no drafter and compile no grammar."""
        return self.grammars.is_ready(new.params.structured) and self.drafters.is_ready(
            new.speculation, AnswerHints.of(new)
        )

    def _grammar_states(self, new: NewRequest) -> Sequence[AnswerState | None]:
        """Return the grammar state of each answer; None: any token is allowed."""
        params, thinking = new.params, new.params.thinking
        grammars: Sequence[GrammarState | None] = [None] * params.n
        if params.structured is not None:
            grammars = self.grammars.begin_all(params.structured, params.n, new.tenant)
        if thinking is None:
            return grammars
        tags = self.vocabulary.thinking_tags(thinking)
        return [ThinkingState(tags, thinking.budget, thinking.is_open, grammar) for grammar in grammars]

    @refusing("speculation")
    def _assign(self, new: NewRequest) -> Assignment:
        """Return what the policy file decides; without a file, the drafter that the request selects."""
        if self.policy_file is not None:
            return self.policy_file.assign(new)
        return Assignment(plan=self.drafters.resolve(new.speculation, AnswerHints.of(new)))

    @refusing("prompt")
    def _check_prompt(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        self._check_ids(prompt, "prompt")
        if len(prompt) >= self.context_length:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens and the context holds {self.context_length}, "
                "at least one of them for the answer; shorten the prompt"
            )

    def _check_ids(self, tokens: Sequence[int], where: str) -> None:
        size = self.vocabulary.size
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < size:
                raise RequestError(
                    f"token id {token} in the {where} is outside the vocabulary of {size}", where
                )


def _check_service(new: NewRequest) -> None:
    """Check the priority and the deadline."""
    if not isinstance(new.priority, int):
        raise RequestError(f"priority must be a whole number, not {new.priority!r}", "priority")
    if new.deadline_ms is not None:
        if not isinstance(new.deadline_ms, int | float):
            raise RequestError(f"deadline_ms must be a number, not {new.deadline_ms!r}", "deadline_ms")
        if not new.deadline_ms > 0:
            raise RequestError(f"deadline_ms must be positive, not {new.deadline_ms}", "deadline_ms")
        if new.deadline_ms > MOST_DEADLINE_MS:
            raise RequestError(f"deadline_ms must be at most {MOST_DEADLINE_MS:.0f}", "deadline_ms")
    if new.on_deadline not in ON_DEADLINE:
        raise RequestError(
            f"on_deadline must be one of {', '.join(ON_DEADLINE)}, not {new.on_deadline!r}", "on_deadline"
        )
