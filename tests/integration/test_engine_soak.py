"""Thousands of short requests, many of them cancelled: nothing stays behind."""

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.drafters.config import SpeculationConfig
from foreword.engine.config import EngineConfig, EngineParts
from foreword.engine.core import EngineCore
from foreword.engine.loader import LoadedModel, load_model
from foreword.engine.messages import NewRequest
from foreword.speculation.protocols import Drafter

SPECULATIONS: tuple[Any, ...] = (
    False,
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix", "num_speculative_tokens": 6, "max_stored_tokens": 1000},
    {"method": "layer_skip", "exit_layer": 1, "num_speculative_tokens": 3},
    {"method": "layer_skip", "exit_layer": 1, "num_speculative_tokens": 6, "tree_width": 2},
    {"method": ["ngram", "layer_skip"], "exit_layer": 1, "num_speculative_tokens": 6, "combine": "merge"},
)


class Soak:
    """An engine on a tiny model, and users of whom three in ten go away early."""

    def __init__(self, model: LoadedModel, seed: int) -> None:
        self.rng = random.Random(seed)
        self.drafters: list[Drafter] = []
        self.cancelled = 0
        self._model = model
        row_bytes = model.decoder.kv_rows().bytes_per_row
        config = EngineConfig(
            kv_cache_memory_bytes=40 * 16 * row_bytes, max_num_batched_tokens=96, max_num_seqs=16
        )
        self.core = EngineCore(
            model.decoder, model.vocabulary(), EngineParts(config, FixedPolicy(), self._build)
        )
        self._numbers = iter(range(1 << 30))

    def _build(self, config: SpeculationConfig) -> Drafter:
        self.drafters.append(self._model.build_drafter(config))
        return self.drafters[-1]

    def answer(self, count: int) -> None:
        """So many requests from arrival to their end; three in ten are cancelled at a random step."""
        core, rng, left, steps = self.core, self.rng, count, 0
        doomed: dict[str, int] = {}  # request -> step in which it is cancelled, if it is still there
        while left or core.has_requests:
            while left and len(core.scheduler.waiting) < 6:
                name = self._ask()
                left -= 1
                if rng.random() < 0.3:
                    doomed[name] = steps + rng.randrange(6)
            under_way = core.launch()
            assert under_way is not None
            for name in [name for name, step in doomed.items() if step == steps]:
                del doomed[name]
                self.cancelled += len(core.abort(name))
            core.resolve(under_way)
            steps += 1

    def _ask(self) -> str:
        rng, name = self.rng, f"request-{next(self._numbers)}"
        beginning = [5, 6, 7, 8] * 5 if rng.random() < 0.4 else []
        prompt = (*beginning, *(rng.randrange(3, 360) for _ in range(rng.randint(1, 24))))
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.9)), seed=rng.randrange(1 << 40), max_tokens=rng.randint(1, 10)
        )
        self.core.add(NewRequest(name, prompt, params, rng.choice("ab"), rng.choice(SPECULATIONS)))
        return name

    def check_nothing_is_held(self) -> None:
        """Pages, sequences, and whatever drafters keep by request."""
        core = self.core
        core.check_integrity()
        assert core.cache.available_pages == core.cache.pool.num_pages
        assert core.cache.num_open == 0
        for drafter in self.drafters:
            for leaf in leaves(drafter):
                for name, kept in vars(leaf).items():
                    by_request = isinstance(kept, dict) and any(isinstance(key, int) for key in kept)
                    assert not by_request, f"{type(leaf).__name__}.{name} still knows {list(kept)[:5]}"


def leaves(drafter: Any) -> Iterator[Any]:
    """The drafters that a guarded or combined one is made of."""
    inner = getattr(drafter, "_drafters", None) or [getattr(drafter, "_drafter", None)]
    if inner == [None]:
        yield drafter
        return
    for part in inner:
        yield from leaves(part)


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> LoadedModel:
    return load_model(str(tiny_model), device="cpu")


def test_300_requests_leave_nothing_behind(model: LoadedModel):
    soak = Soak(model, seed=0)
    soak.answer(300)
    assert len(soak.drafters) == len(SPECULATIONS) - 1
    assert sum(accepted for _, _, accepted in soak.core.stats().acceptance.values()) > 0
    assert not soak.core.faults
    assert soak.cancelled > 50
    soak.check_nothing_is_held()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_10000_requests_leave_nothing_behind_and_memory_flat(model: LoadedModel):
    soak = Soak(model, seed=1)
    soak.answer(2000)
    warm = resident_bytes()
    soak.answer(8000)
    grown = resident_bytes() - warm
    assert grown < max(0.01 * warm, 8 << 20), f"{grown} bytes more than the {warm} after warm-up"
    soak.check_nothing_is_held()
