"""Engines without a tokenizer, for tests that speak in token ids."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import Decoder
from foreword.control.fixed import FixedPolicy
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.messages import NewRequest
from foreword.engine.requests.request import Request
from foreword.engine.text import Vocabulary
from foreword.speculation.protocols import Policy
from helpers.clocks import ScriptedClock

_numbers = itertools.count()


@dataclass(frozen=True)
class WordVocabulary(Vocabulary):
    """Every request's bad words are these token ids, whatever it says."""

    words: tuple[tuple[int, ...], ...] = ()

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        return self.words


def core_on(
    target: Decoder,
    *,
    end_ids: Sequence[int] = (),
    words: Sequence[Sequence[int]] = (),
    policy: Policy | None = None,
    clock: Callable[[], float] | None = None,
    **config: Any,
) -> EngineCore:
    """An engine on a clock of its own, on which everything takes a little time."""
    vocabulary = WordVocabulary(
        target.config.vocab_size, frozenset(end_ids), words=tuple(tuple(word) for word in words)
    )
    parts = EngineParts(
        EngineConfig(**config), policy or FixedPolicy(), clock=clock or ScriptedClock(tick=1e-4)
    )
    return EngineCore(target, vocabulary, parts)


def ask(core: EngineCore, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Request:
    """Queue a prompt and return the request of its first answer."""
    name = options.pop("request_id", f"test-{next(_numbers)}")
    return core.add(NewRequest(name, tuple(prompt), params, **options))[0]


def run(core: EngineCore) -> None:
    """Step until nothing is left to do."""
    while core.has_requests:
        core.step()
