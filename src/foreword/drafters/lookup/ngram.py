"""Prompt lookup: find the last few tokens earlier in the text and draft what followed them."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.drafters.lookup.by_request import LookupDrafter
from foreword.drafters.registry import chosen_kind
from foreword.errors import RequestError
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask, Traits

_BYTES_PER_RUN, _BYTES_PER_REPEATED = 120, 300
"""Memory of one indexed run with its key, and of what followed one that was seen again, as tracemalloc has it on
CPython 3.11."""

LONGEST_MATCH = 9
"""Tokens before a copy that are looked at to see how far it is to be trusted."""

_CONFIDENCE = (0.0, 0.4, 0.6, 0.75, 0.75, 0.9, 0.9, 0.9, 0.9, 0.97)
"""Confidence by the number of tokens that match before a draft token, draft tokens included."""

_BYTES_PER_TOKEN = 8
"""Memory of one token of an indexed text beside its runs."""


@dataclass(frozen=True)
class NgramConfig:
    """How prompt lookup matches; names follow vLLM."""

    prompt_lookup_max: int = 4  # longest run of tokens that is looked up
    prompt_lookup_min: int = 2  # shortest run that counts as a match

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise RequestError(
                "prompt_lookup_min and prompt_lookup_max must satisfy 1 <= min <= max, "
                f"not {self.prompt_lookup_min} and {self.prompt_lookup_max}"
            )


class _Followers:
    """What came after a run of tokens that was seen more than once."""

    __slots__ = ("best", "counts", "most")

    def __init__(self, first: int, position: int) -> None:
        self.counts = {first: 1}  # next token -> how often
        self.most = 1  # of the counts
        self.best = position  # newest of the most frequent follower; of equals the newer one

    def add(self, token: int, position: int) -> None:
        count = self.counts[token] = self.counts.get(token, 0) + 1
        if count >= self.most:
            self.most, self.best = count, position


class NgramIndex:
    """Every run of `shortest` to `longest` tokens of a growing text, with what followed it.

    Learning a token and looking one up cost the same at any length of text.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = range(longest, shortest - 1, -1)
        # By run; a number is the place of what followed one that was seen once, as most are.
        self._followers: dict[tuple[int, ...], _Followers | int] = {}
        self._repeated = 0  # runs that were seen more than once
        self._tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Learn the tokens that come next in the text. Every token of every text comes through here."""
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
        """What followed the longest known run that ends the text, and how many tokens match before it.

        A repeating text is repeated on.
        """
        for size in self._sizes:
            found = self._followers.get(tuple(self._tokens[-size:]))
            if found is not None and size <= len(self._tokens):
                start = found if isinstance(found, int) else found.best
                return self._copy_from(start, count), self._match_before(start, size)
        return [], 0

    def _match_before(self, start: int, known: int) -> int:
        """How many tokens before a place are those that end the text; so many are known to be."""
        tokens, most = self._tokens, min(LONGEST_MATCH, start)
        while known < most and tokens[start - 1 - known] == tokens[-1 - known]:
            known += 1
        return known

    def _copy_from(self, start: int, count: int) -> list[int]:
        period = len(self._tokens) - start  # beyond the end of the text the copy reads itself
        return [self._tokens[start + offset % period] for offset in range(count)]

    def memory_bytes(self) -> int:
        """About what the index takes, by the number of its entries."""
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
        """About what the indexes of all running requests take."""
        return sum(index.memory_bytes() for _, index in self._known.values())

    def draft(self, task: DraftTask) -> Draft:
        """A chain, empty where nothing matches."""
        request = task.request
        index = self._index(request)
        index.extend(request.tokens[len(index) :])
        drafted, matched = index.continuation(min(task.max_nodes, task.max_depth))
        sure = [_CONFIDENCE[min(matched + place, LONGEST_MATCH)] for place in range(len(drafted))]
        return Draft.chain(drafted, len(request.tokens), request.epoch, confidence=sure)

    def _index(self, request: DraftRequest) -> NgramIndex:
        """The request's index; a new one if its text is not the indexed text grown on."""
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
