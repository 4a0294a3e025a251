"""What `ngram` and `suffix` say of their memory: near the truth, growing with the text, gone with the request."""

import gc
import itertools
import random
import tracemalloc
from collections.abc import Callable

import pytest

from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
from foreword.drafters.lookup.suffix import SuffixConfig, SuffixDrafter
from helpers.asks import ask, text_request


def ngram() -> NgramDrafter:
    return NgramDrafter(NgramConfig())


def suffix() -> SuffixDrafter:
    return SuffixDrafter(SuffixConfig(max_stored_tokens=0))


def text(kind: str, length: int) -> list[int]:
    rng = random.Random(3)
    if kind == "repeating":
        passage = [rng.randrange(300, 49_000) for _ in range(40)]
        return (passage * (length // 40 + 1))[:length]
    widest = 49_000 if kind == "varied" else 320
    return [rng.randrange(300, widest) for _ in range(length)]


@pytest.mark.parametrize("make", [ngram, suffix])
@pytest.mark.parametrize("kind", ["varied", "repeating", "narrow"])
def test_the_estimate_is_near_what_python_allocates(make: Callable, kind: str):
    requests = [text_request(text(kind, length)) for length in (1500, 3000)]
    gc.collect()
    tracemalloc.start()
    drafter = make()
    for request in requests:
        drafter.propose([ask(request)])
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.6 * allocated < drafter.memory_bytes() < 1.4 * allocated


@pytest.mark.parametrize("make", [ngram, suffix])
def test_it_grows_with_the_text_and_falls_when_requests_end(make: Callable):
    drafter = make()
    assert drafter.memory_bytes() == 0
    requests = [text_request(text("varied", 200)) for _ in range(3)]
    sizes = []
    for request in requests:
        drafter.propose([ask(request)])
        sizes.append(drafter.memory_bytes())
        request.tokens.extend(text("narrow", 200))
        drafter.propose([ask(request)])
        sizes.append(drafter.memory_bytes())
    assert all(later > earlier for earlier, later in itertools.pairwise(sizes))
    drafter.forget(requests[0])
    assert drafter.memory_bytes() < sizes[-1]
    for request in requests:
        drafter.forget(request)
    assert drafter.memory_bytes() == 0


def test_what_a_store_remembers_is_counted_and_bounded():
    drafter = SuffixDrafter(SuffixConfig(max_stored_tokens=500))
    remembered = []
    for turn in range(12):
        tokens = [token + turn for token in text("varied", 200)]
        request = text_request(tokens, prompt_len=100, tenant="one")
        drafter.propose([ask(request)])
        drafter.forget(request)
        remembered.append(drafter.memory_bytes())
    assert 0 < remembered[0] < remembered[1]
    assert max(remembered) < 8 * remembered[0]


def test_a_warm_file_is_counted_for_every_tenant():
    drafter = SuffixDrafter(SuffixConfig(), text("varied", 300))
    sizes = []
    for tenant in ("one", "two"):
        drafter.store(tenant)
        sizes.append(drafter.memory_bytes())
    assert sizes[1] == 2 * sizes[0] > 300
