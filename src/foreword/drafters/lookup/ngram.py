"""Prompt lookup: finds an earlier occurrence of the text's last tokens and drafts the tokens that followed it."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.drafters.lookup.base import LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.errors import RequestError
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, Traits
from foreword.speculation.settings import DrafterSettings, setting

_BYTES_PER_NGRAM, _BYTES_PER_REPEATED = 120, 300
"""Approximate bytes of an n-gram, and additional bytes if it occurs again, by tracemalloc on CPython 3.11."""

LONGEST_MATCH = 9  # maximum match length that is measured for the confidence

_CONFIDENCE = (0.0, 0.4, 0.6, 0.75, 0.75, 0.9, 0.9, 0.9, 0.9, 0.97)
"""Confidence of a draft token by the number of matching tokens before it, including draft tokens."""

_BYTES_PER_TOKEN = 8  # approximate bytes per token of an indexed text besides its n-grams


@dataclass(frozen=True)
class NgramConfig(DrafterSettings):
    """Match lengths; names follow vLLM."""

    prompt_lookup_max: int = setting(4, "maximum match length")
    prompt_lookup_min: int = setting(2, "minimum match length")

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise RequestError(
                "prompt_lookup_min and prompt_lookup_max must satisfy 1 <= min <= max, "
                f"not {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )


class _Followers:
    """Counts of the tokens that follow an n-gram which occurs more than once."""

    __slots__ = ("best", "counts", "most")

    def __init__(self, first: int, position: int) -> None:
        self.counts = {first: 1}  # next token -> count
        self.most = 1  # highest count
        self.best = position  # latest position of the most frequent next token

    def add(self, token: int, position: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + 1
        if count >= self.most:
            self.most, self.best = count, position


class NgramIndex:
    """Indexes all n-grams of `shortest` to `longest` tokens of a growing text, with their continuations.

    Adding a token and looking one up take constant time.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        # By n-gram. Most occur once; for them the value is the position of the continuation.
        self._followers: dict[tuple[int, ...], _Followers | int] = {}
        self._repeated = 0  # n-grams seen more than once
        self._tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. The code is optimised, since it runs for every token of every text."""
        text, followers, longest = self._tokens, self._followers, self._sizes[0]
        for token in tokens:
            position, tail = len(text), tuple(text[-longest:])
            for size in self._sizes:
                if size > position:
                    continue
                ngram = tail[-size:]
                entry = followers.setdefault(ngram, position)
                if entry == position:  # first occurrence of the n-gram
                    continue
                if isinstance(entry, int):
                    entry = followers[ngram] = _Followers(text[entry], entry)
                    self._repeated += 1
                entry.add(token, position)
            text.append(token)

    def continuation(self, count: int) -> tuple[list[int], int]:
        """Return the `count` tokens after the longest indexed n-gram at the text's end, and the match length.

        If they extend beyond the text's end, they repeat periodically.
        """
        for size in self._sizes:
            entry = self._followers.get(tuple(self._tokens[-size:]))
            if entry is not None and size <= len(self._tokens):
                start = entry if isinstance(entry, int) else entry.best
                period = len(self._tokens) - start  # a copy beyond the text's end repeats itself
                copied = [self._tokens[start + offset % period] for offset in range(count)]
                return copied, self._match_before(start, size)
        return [], 0

    def _match_before(self, start: int, length: int) -> int:
        """Return how many tokens before `start` equal the text's last ones, at least `length`."""
        tokens, limit = self._tokens, min(LONGEST_MATCH, start)
        while length < limit and tokens[start - 1 - length] == tokens[-1 - length]:
            length += 1
        return length

    def memory_bytes(self) -> int:
        ngrams = len(self._followers) * _BYTES_PER_NGRAM + self._repeated * _BYTES_PER_REPEATED
        return ngrams + len(self._tokens) * _BYTES_PER_TOKEN

    def __len__(self) -> int:
        return len(self._tokens)


class NgramDrafter(LookupDrafter[tuple[int, NgramIndex]]):
    """Drafts chains from each request's own text."""

    traits = Traits(is_free=True)

    def __init__(self, config: NgramConfig) -> None:
        super().__init__()
        self._config = config

    def memory_bytes(self) -> int:
        return sum(index.memory_bytes() for _, index in self._known.values())

    def draft(self, task: DraftTask) -> Draft:
        request = task.request
        index = self._index(request)
        index.extend(request.tokens[len(index) :])
        drafted, matched = index.continuation(min(task.max_nodes, task.max_depth))
        confidence = [_CONFIDENCE[min(matched + index, LONGEST_MATCH)] for index in range(len(drafted))]
        return Draft.chain(drafted, len(request.tokens), request.epoch, confidence=confidence)

    def _index(self, request: DraftRequest) -> NgramIndex:
        """Return the request's index; a new one if its text does not extend the indexed text."""
        epoch, index = self._known.get(request.request_id, (request.epoch, None))
        if index is None or epoch != request.epoch or len(index) > len(request.tokens):
            index = NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
            self._known[request.request_id] = (request.epoch, index)
        return index


KIND = chosen_kind(NgramDrafter, "looks the last tokens up earlier in the text", NgramConfig)
