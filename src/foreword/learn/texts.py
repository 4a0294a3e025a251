"""The served texts that the head is trained on: a ring in memory, bounded by tokens and age."""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from foreword.learn.settings import LearnSettings
from foreword.train.texts.documents import Document, is_held_out, prompt_digest

KIND = "served"  # kind of the documents, shown on a version's card


@dataclass(frozen=True)
class ServedText:
    """An answered prompt."""

    document: Document
    tenant: str
    at: float  # seconds since 1970
    number: int = 0  # in order of arrival

    @cached_property
    def answer_tokens(self) -> int:
        return int(self.document.is_answer.sum())

    @property
    def tokens(self) -> int:
        return len(self.document.tokens)


@dataclass(frozen=True)
class TrainingTexts:
    """The texts of one training."""

    documents: tuple[Document, ...]
    tenants: tuple[str, ...]
    new_tokens: int  # answer tokens that no earlier training has had
    last_number: int  # of the newest text

    @property
    def tokens(self) -> int:
        """Number of tokens that are trained on."""
        return sum(len(document.tokens) for document in self.documents if not document.held_out)


@dataclass(frozen=True)
class KeptTexts:
    """The texts that are kept at one moment."""

    texts: tuple[ServedText, ...]
    trained: int  # number of the newest text that a training has had
    last_number: int  # of the newest text

    def for_training(self) -> TrainingTexts:
        """Return the new texts, as many tokens of older ones, and all held-out texts, newest first."""
        new = [text for text in self.texts if text.number > self.trained]
        older = [text for text in self.texts if text.number <= self.trained]
        measured = [text for text in reversed(self.texts) if text.document.held_out]
        chosen = [text for text in [*new, *_sample(older, new)] if not text.document.held_out]
        if not measured:
            measured, chosen = _hold_out_one(chosen)
        texts = [*measured, *chosen]
        return TrainingTexts(
            tuple(text.document for text in texts),
            tuple(sorted({text.tenant for text in texts})),
            sum(text.answer_tokens for text in new),
            self.last_number,
        )

    def has(self, tenant: str) -> bool:
        """Return whether a tenant has any of the texts."""
        return any(text.tenant == tenant for text in self.texts)


class ServedTexts:
    """Keeps the newest texts of the tenants that take part."""

    def __init__(self, settings: LearnSettings, wall_clock: Callable[[], float]) -> None:
        self._settings, self._clock = settings, wall_clock
        self._texts: deque[ServedText] = deque()
        self._numbers = 0
        self._trained = 0  # number of the newest text that a training has had
        self.tokens = 0  # of all kept texts
        self.new_tokens = 0  # answer tokens since the last training

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[ServedText]:
        return iter(tuple(self._texts))

    def kept(self) -> KeptTexts:
        """Return the kept texts, of which a thread may choose those of a training."""
        return KeptTexts(tuple(self._texts), self._trained, self._numbers)

    def add(self, prompt: Sequence[int], answer: Sequence[int], tenant: str, temperature: float) -> bool:
        """Keep a text if its tenant takes part and its length is suitable; return whether it is kept."""
        settings, length = self._settings, len(prompt) + len(answer)
        longest = min(settings.text_tokens, settings.tokens)  # a longer one would drop all others and itself
        if not prompt or len(answer) < settings.min_answer_tokens or length > longest:
            return False
        if not settings.takes_part(tenant):
            return False
        held_out = is_held_out(prompt, settings.held_out_permille)
        is_answer = np.zeros(length, np.bool_)
        is_answer[len(prompt) :] = True
        tokens = np.asarray([*prompt, *answer], np.int32)
        self.put(ServedText(Document(tokens, is_answer, KIND, temperature, held_out), tenant, self._clock()))
        return True

    def put(self, text: ServedText) -> None:
        """Keep a text, and drop the oldest ones beyond the limits."""
        self._numbers += 1
        self._texts.append(replace(text, number=self._numbers))
        self.tokens += text.tokens
        self.new_tokens += text.answer_tokens
        while self.tokens > self._settings.tokens:
            self.tokens -= self._texts.popleft().tokens
        self.expire()

    def expire(self) -> None:
        """Drop the texts that are too old. They no longer count as new: a training could find no text."""
        oldest = self._clock() - 3600 * self._settings.hours
        while self._texts and self._texts[0].at < oldest:
            text = self._texts.popleft()
            self.tokens -= text.tokens
            self.new_tokens -= text.answer_tokens if text.number > self._trained else 0

    def forget(self, tenant: str) -> None:
        """Drop all texts of a tenant."""
        self._texts = deque(text for text in self._texts if text.tenant != tenant)
        self.tokens = sum(text.tokens for text in self._texts)
        self._count_new()

    def for_training(self) -> TrainingTexts:
        """Return the texts of a training that begins now."""
        return self.kept().for_training()

    def trained(self, texts: TrainingTexts) -> None:
        """Record that a training has had these texts."""
        self._trained = texts.last_number
        self._count_new()

    def _count_new(self) -> None:
        self.new_tokens = sum(text.answer_tokens for text in self._texts if text.number > self._trained)


def _sample(older: Sequence[ServedText], new: Sequence[ServedText]) -> list[ServedText]:
    """Return a random sample of the older texts with about as many tokens as the new ones."""
    room, chosen = sum(text.tokens for text in new), []
    for text in random.Random(len(older)).sample(older, len(older)):
        room -= text.tokens
        if room < 0:
            break
        chosen.append(text)
    return chosen


def _hold_out_one(texts: list[ServedText]) -> tuple[list[ServedText], list[ServedText]]:
    """Hold out the texts of one prompt, the one with the smallest hash; return them and the others."""
    if not texts:
        return [], []
    digests = [prompt_digest(text.document.tokens[: text.document.answer_begin]) for text in texts]
    smallest = min(digests)
    pairs = list(zip(texts, digests, strict=True))
    measured = [
        replace(text, document=replace(text.document, held_out=True))
        for text, digest in pairs
        if digest == smallest
    ]
    return measured, [text for text, digest in pairs if digest != smallest]
