"""Prompt lookup: finds the last tokens earlier in the text and drafts what followed."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.drafters.lookup.base import LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.errors import RequestError
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, Traits
from foreword.speculation.settings import DrafterSettings, setting

_BYTES_PER_RUN, _BYTES_PER_REPEATED = 120, 300
"""Approximate bytes per indexed run, and per run seen more than once, by tracemalloc on CPython 3.11."""

LONGEST_MATCH = 9  # maximum match length that is measured for the confidence

_CONFIDENCE = (0.0, 0.4, 0.6, 0.75, 0.75, 0.9, 0.9, 0.9, 0.9, 0.97)
"""Confidence by match length before a draft token, including draft tokens."""

_BYTES_PER_TOKEN = 8  # approximate bytes per token of an indexed text besides its runs


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
    """Continuations of a run that occurred more than once."""

    __slots__ = ("best", "counts", "most")

    def __init__(self, first: int, position: int) -> None:
        self.counts = {first: 1}  # next token -> count
        self.most = 1  # highest count
        self.best = position  # latest position of the most frequent continuation

    def add(self, token: int, position: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + 1
        if count >= self.most:
            self.most, self.best = count, position


class NgramIndex:
    """All runs of `shortest` to `longest` tokens of a growing text, with their continuations.

    Adding a token and looking one up take constant time.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        # By run; an int is the continuation's position of a run seen once, the most common case.
        self._followers: dict[tuple[int, ...], _Followers | int] = {}
        self._repeated = 0  # runs seen more than once
        self._tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. Every token of every text passes through here."""
        known, followers, longest = self._tokens, self._followers, self._sizes[0]
        for token in tokens:
            position, tail = len(known), tuple(known[-longest:])
            for size in self._sizes:
                if size > position:
                    continue
                run = tail[-size:]
                found = followers.setdefault(run, position)
                if found == position:
                    continue
                if isinstance(found, int):
                    found = followers[run] = _Followers(known[found], found)
                    self._repeated += 1
                found.add(token, position)
            known.append(token)

    def continuation(self, count: int) -> tuple[list[int], int]:
        """Return the continuation of the longest run that ends the text, and the match length before it.

        A repeating text is continued periodically.
        """
        for size in self._sizes:
            found = self._followers.get(tuple(self._tokens[-size:]))
            if found is not None and size <= len(self._tokens):
                start = found if isinstance(found, int) else found.best
                period = len(self._tokens) - start  # a copy beyond the text's end repeats itself
                copied = [self._tokens[start + offset % period] for offset in range(count)]
                return copied, self._match_before(start, size)
        return [], 0

    def _match_before(self, start: int, known: int) -> int:
        """Return the match length before a position; at least `known` tokens match."""
        tokens, most = self._tokens, min(LONGEST_MATCH, start)
        while known < most and tokens[start - 1 - known] == tokens[-1 - known]:
            known += 1
        return known

    def memory_bytes(self) -> int:
        runs = len(self._followers) * _BYTES_PER_RUN + self._repeated * _BYTES_PER_REPEATED
        return runs + len(self._tokens) * _BYTES_PER_TOKEN

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
        sure = [_CONFIDENCE[min(matched + place, LONGEST_MATCH)] for place in range(len(drafted))]
        return Draft.chain(drafted, len(request.tokens), request.epoch, confidence=sure)

    def _index(self, request: DraftRequest) -> NgramIndex:
        """Return the request's index; a new one if its text does not extend the indexed text."""
        epoch, index = self._known.get(request.request_id, (request.epoch, None))
        if index is None or epoch != request.epoch or len(index) > len(request.tokens):
            index = NgramIndex(self._config.prompt_lookup_min, self._config.prompt_lookup_max)
            self._known[request.request_id] = (request.epoch, index)
        return index


KIND = chosen_kind(
    "looks the last tokens up earlier in the text",
    NgramConfig,
    lambda settings, _: NgramDrafter(settings),
    traits=NgramDrafter.traits,
)
