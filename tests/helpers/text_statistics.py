"""Do texts come from the law they should come from, and which bias would be seen?"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

FALSE_ALARMS = 0.001
"""Of a run of texts that follow the law, by either statistic."""

CLEAN_RUNS, BIASED_RUNS = 20_000, 2_000
RAREST = 5.0
"""Texts that are expected less often than this are counted together."""


@dataclass(frozen=True)
class TextStatistics:
    """Chi-square of the texts as a whole, and of every next token after the two before it, over all places.

    The first sees any bias, the second sees small ones that are the same at every place: it has fewer cells and more
    tokens than there are texts.
    """

    after: np.ndarray  # [vocab, vocab, vocab], the law of the next token after two
    prompt: tuple[int, ...]
    length: int
    samples: int

    @cached_property
    def texts(self) -> list[tuple[int, ...]]:
        return list(product(range(len(self.after)), repeat=self.length))

    @cached_property
    def law(self) -> np.ndarray:
        """[texts]"""
        return self.law_of(self.after)

    def law_of(self, after: np.ndarray) -> np.ndarray:
        """[texts], the law of texts whose next tokens follow `after`."""
        return np.array([np.prod([after[place] for place in self._places(text)]) for text in self.texts])

    def _places(self, text: Sequence[int]) -> list[tuple[int, ...]]:
        """Every token of the text behind the two before it."""
        line = [*self.prompt, *text]
        start = len(self.prompt)
        return [tuple(line[end - 2 : end + 1]) for end in range(start, len(line))]

    def counts(self, found: Iterable[tuple[int, ...]]) -> np.ndarray:
        """[texts], how often each came; one that is impossible is an error."""
        seen = Counter(found)
        assert set(seen) <= set(self.texts)
        assert seen.total() == self.samples
        return np.array([seen[text] for text in self.texts], np.float64)

    def statistics(self, counts: np.ndarray) -> np.ndarray:
        """[..., 2] of counts [..., texts]."""
        return np.stack([self._of_texts(counts), self._of_tokens(counts)], axis=-1)

    def _of_texts(self, counts: np.ndarray) -> np.ndarray:
        expected = self.samples * self.law
        common = expected >= RAREST
        seen = np.concatenate([counts[..., common], counts[..., ~common].sum(-1, keepdims=True)], -1)
        wanted = np.append(expected[common], expected[~common].sum())
        return _chi_square(seen, wanted)

    def _of_tokens(self, counts: np.ndarray) -> np.ndarray:
        seen = counts @ self._tokens_of_text  # [..., vocab ** 3]
        seen = seen.reshape(*seen.shape[:-1], *self.after.shape)
        return _chi_square(seen, seen.sum(-1, keepdims=True) * self.after).sum((-2, -1))

    @cached_property
    def _tokens_of_text(self) -> np.ndarray:
        """[texts, vocab ** 3], how often a text has each token behind each two."""
        found = np.zeros((len(self.texts), *self.after.shape))
        for number, text in enumerate(self.texts):
            for place in self._places(text):
                found[number][place] += 1
        return found.reshape(len(self.texts), -1)

    @cached_property
    def thresholds(self) -> np.ndarray:
        """[2], what texts of the law exceed in half of the false alarms each."""
        clean = self.statistics(self._draw(self.law, CLEAN_RUNS, seed=1))
        found: np.ndarray = np.quantile(clean, 1 - FALSE_ALARMS / 2, axis=0)
        return found

    def power(self, biased: np.ndarray) -> float:
        """How often a run of texts with this law [texts] is beyond a threshold."""
        found = self.statistics(self._draw(biased, BIASED_RUNS, seed=2))
        return float((found > self.thresholds).any(-1).mean())

    def _draw(self, law: np.ndarray, runs: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).multinomial(self.samples, law, runs).astype(np.float64)


def least_visible(law: np.ndarray, bias: float) -> np.ndarray:
    """[...] `law` [...] with this much total variation in every row, spread so that chi-square sees the least of it.

    One part of the outcomes gains in proportion, the other loses; it shows least where each has half of the mass.
    """
    order = np.argsort(-law, axis=-1)
    gains = np.zeros(law.shape, bool)
    parts = np.cumsum(np.take_along_axis(law, order, -1), -1)
    np.put_along_axis(gains, order, parts - np.take_along_axis(law, order, -1) / 2 <= 0.5, -1)
    mass = (law * gains).sum(-1, keepdims=True)
    return law * np.where(gains, 1 + bias / mass, 1 - bias / (1 - mass))


def total_variation(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.abs(one - other).sum(-1) / 2
    return found


def _chi_square(seen: np.ndarray, expected: np.ndarray) -> np.ndarray:
    apart = (seen - expected) ** 2
    return np.divide(apart, expected, out=np.zeros_like(apart), where=expected > 0).sum(-1)
