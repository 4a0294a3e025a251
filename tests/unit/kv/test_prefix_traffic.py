"""The prefix cache under random traffic, run against a memory whose rows say whose history they are."""

import random
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import pytest

from foreword.kv.block_pool import OutOfPages
from foreword.kv.paged_cache import PagedCache
from foreword.kv.prefix_cache import PrefixNode
from foreword.kv.sequence import KvSequence
from helpers.pretend_memory import PretendMemory

TENANTS = ("", "b")
STEPS = 250


@dataclass(frozen=True)
class Guess:
    """One sequence's part of a pass: a run of committed tokens, then a drafted tree."""

    run: int
    parents: list[int]  # node -> parent node, -1 is the run's end
    tokens: list[int]  # per node
    path: list[int]  # nodes that will be accepted


class Traffic:
    """Requests that open, compute, fork, publish, fail and close in a tiny pool."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cache = PagedCache(
            self.rng.choice([7, 14, 24]), self.rng.choice([1, 2, 3, 4]), prefix_caching=True
        )
        self.memory = PretendMemory(self.cache)
        self.texts: dict[KvSequence, list[int]] = {}  # committed tokens of the open ones
        self.old_texts: list[list[int]] = []
        self.seen: Counter[str] = Counter()

    def step(self) -> None:
        """One random event."""
        names = ["open"] * 5 + ["work"] * 8 + ["close"] * 2 + ["fork", "publish", "clear"]
        name = self.rng.choice(names)
        if name == "clear":
            if self.rng.random() < 0.1:
                self.cache.clear_prefix_cache()
        elif name == "open":
            self.open()
        elif self.texts:
            getattr(self, name)()

    def any(self) -> KvSequence:
        return self.rng.choice(list(self.texts))

    def open(self) -> None:
        if len(self.texts) >= 4:
            return
        text = self.new_text()
        tenant = self.rng.choice(TENANTS)
        expected = self.cache.matching_pages(tenant, text)
        available, idle = self.cache.available_pages, self.cache.idle_matching_pages(tenant, text)
        sequence = self.cache.open(tenant, text)
        assert sequence.computed == expected * self.cache.page_size < len(text)
        assert self.cache.available_pages == available - idle
        self.seen["hit"] += expected > 0
        self.texts[sequence] = text

    def new_text(self) -> list[int]:
        """Often one that somebody has asked or got before, a little longer or shorter."""
        if self.old_texts and self.rng.random() < 0.6:
            old = self.rng.choice(self.old_texts[-6:])
            text = old[: self.rng.randint(len(old) // 2, len(old))] + [
                self.rng.randint(0, 1)
            ] * self.rng.randint(1, 2)
        else:
            text = [self.rng.randint(0, 1) for _ in range(self.rng.randint(1, 12))]
        return text[: 6 * self.cache.page_size]

    def close(self, sequence: KvSequence | None = None) -> None:
        sequence = sequence or self.any()
        self.cache.close(sequence)
        self.old_texts.append(self.texts.pop(sequence))

    def fork(self) -> None:
        source = self.any()
        if len(self.texts) >= 5:
            return
        rows = self.rng.randint(0, source.computed)
        with suppress(OutOfPages):
            twin = self.cache.fork(source, rows)
            self.texts[twin] = self.texts[source][: self.rng.randint(rows, len(self.texts[source]))] or [0]
            self.seen["fork"] += 1

    def publish(self, sequence: KvSequence | None = None) -> None:
        sequence = sequence or self.any()
        before = list(sequence.pages)
        self.cache.publish(sequence, self.texts[sequence])
        self.seen["second copy"] += sequence.pages != before

    def work(self) -> None:
        """A pass over some of the sequences; while it is under way some are cancelled and others come."""
        wanted = self.rng.sample(list(self.texts), self.rng.randint(1, len(self.texts)))
        guesses = {s: guess for s in wanted if (guess := self.reserve(s)) is not None}
        for starved in [s for s in wanted if s not in guesses and self.rng.random() < 0.5]:
            self.close(starved)
        under_way = self.memory.launch({s: self.histories(s, guess) for s, guess in guesses.items()})
        if self.rng.random() < 0.2:
            self.open()
        cancelled = self.any() if self.texts and self.rng.random() < 0.1 else None
        if cancelled is not None:
            self.close(cancelled)
        if self.rng.random() < 0.2:
            self.seen["lost moves"] += len(under_way.moves)
            self.memory.resolve(under_way, fail=True)
            return
        self.memory.resolve(under_way)
        for sequence, guess in guesses.items():
            if sequence is not cancelled:
                self.commit(sequence, guess)

    def reserve(self, sequence: KvSequence) -> Guess | None:
        """Reserve rows for a guess; eviction must be as rare and as strong as promised."""
        missing = len(self.texts[sequence]) - sequence.computed
        run = missing if self.rng.random() < 0.7 else self.rng.randint(min(1, missing), missing)
        guess = self.guess(run) if run == missing else Guess(run, [], [], [])
        rows = run + len(guess.tokens)
        needed = max(0, self.cache.pages_for(sequence.computed + rows) - len(sequence.pages))
        free, available = self.cache.free_pages, self.cache.available_pages
        published = self.published()
        try:
            self.cache.reserve(sequence, rows)
        except OutOfPages:
            assert needed > available
            assert (self.cache.free_pages, self.published()) == (free, published)
            return None
        evicted = max(0, needed - free)
        assert len(self.published()) == len(published) - evicted
        assert self.cache.available_pages == available - needed
        self.seen["evicted"] += evicted
        return guess

    def guess(self, run: int) -> Guess:
        nodes = self.rng.randint(0, 5)
        parents = [self.rng.randint(-1, node - 1) for node in range(nodes)]
        path: list[int] = []
        node = self.rng.randint(-1, nodes - 1)
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        return Guess(run, parents, [self.rng.randint(0, 1) for _ in range(nodes)], path)

    def histories(self, sequence: KvSequence, guess: Guess) -> list[object]:
        """What the pass writes: each row's tenant and all tokens up to its own."""
        text, end = self.texts[sequence], sequence.computed + guess.run
        rows = [tuple(text[: row + 1]) for row in range(sequence.computed, end)]
        nodes: list[tuple[int, ...]] = []
        for parent, token in zip(guess.parents, guess.tokens, strict=True):
            nodes.append((*(nodes[parent] if parent >= 0 else text[:end]), token))
        return [(sequence.tenant, history) for history in rows + nodes]

    def commit(self, sequence: KvSequence, guess: Guess) -> None:
        self.cache.commit(sequence, guess.run, guess.path)
        if sequence.computed - len(guess.path) == len(
            self.texts[sequence]
        ):  # else it was a chunk of a prompt
            own = self.rng.randint(0, 1)
            self.texts[sequence] = [*self.texts[sequence], *(guess.tokens[node] for node in guess.path), own]
        if self.rng.random() < 0.8:
            self.publish(sequence)

    def published(self) -> set[PrefixNode]:
        return set(self.cache._prefix._nodes.values())

    def check(self) -> None:
        """Every computed row, and every page that anybody could hit, holds the history it stands for."""
        self.cache.check_integrity()
        for sequence, text in self.texts.items():
            expected = [(sequence.tenant, tuple(text[: row + 1])) for row in range(sequence.computed)]
            assert self.memory.computed_rows(sequence) == expected
        size = self.cache.page_size
        for node in self.published():
            above, text = node.parent, node.tokens
            while isinstance(above, PrefixNode):
                text, above = above.tokens + text, above.parent
            rows = [self.memory.rows[node.page * size + offset] for offset in range(size)]
            first = len(text) - size
            assert rows == [(above, text[: row + 1]) for row in range(first, len(text))]


@pytest.mark.parametrize("seed", range(20))
def test_every_hit_is_the_asked_tenants_text(seed: int):
    traffic = Traffic(seed)
    for _ in range(STEPS):
        traffic.step()
        traffic.check()
    for sequence in list(traffic.texts):
        traffic.close(sequence)
    traffic.check()
    cache = traffic.cache
    assert cache.available_pages == cache.pool.num_pages
    cache.clear_prefix_cache()
    assert cache.free_pages == cache.pool.num_pages


def test_the_traffic_meets_what_it_is_meant_to_meet():
    seen: Counter[str] = Counter()
    for seed in range(10):
        traffic = Traffic(seed)
        for _ in range(STEPS):
            traffic.step()
        seen += traffic.seen
    assert all(seen[event] >= 20 for event in ("hit", "second copy", "fork", "evicted", "lost moves")), seen
