"""Recurrent layers on the CPU kernels: as the torch decoder computes them; states are shared and never changed."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.backends.cpu.kv_store import CpuKvStore
from foreword.backends.runner import ModelRunner
from foreword.errors import CheckpointError
from foreword.kv.chunks import CHUNK, RING_ROWS, StateSizes
from foreword.kv.paged_cache import PagedCache
from foreword.models.adapters import RECURRENT_MODULES, open_adapter
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry, Verdict
from foreword.speculation.transaction import Transaction
from helpers.adapters import ALL, adapter_tensors, write_adapter
from helpers.cpu import INSTRUCTION_SETS, cpu_decoder, needs_cpu_kernels
from helpers.passes import adapted_logits, all_logits, compute, make_request, torch_decoder, with_all_logits
from helpers.tiny_families import HYBRIDS, make_family
from helpers.trees import random_tokens, random_tree

pytestmark = needs_cpu_kernels

CLOSE = 1e-4
"""Relative to the largest logit: different sums of the same numbers in float32."""


@pytest.fixture(scope="module", params=list(HYBRIDS))
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp(request.param), request.param)[0]


def fresh(path: Path) -> tuple[ModelRunner, PagedCache]:
    states = StateSizes(3, 4)
    cache = PagedCache(64, prefix_caching=True, states=states)
    decoder = cpu_decoder(path, "int8", threads=1)
    return ModelRunner.allocate(decoder, 64, cache.page_size, states=states), cache


def test_sizes_of_chunks_and_rings_are_those_of_the_kernels():
    from foreword.kernels import _native

    assert (_native.STATE_CHUNK, _native.RING_ROWS) == (CHUNK, RING_ROWS)


def test_states_are_counted_in_float32_whatever_kv_rows_have(path: Path):
    decoder = cpu_decoder(path, "int8", threads=1)
    counted = decoder.state_spec()
    assert counted is not None
    assert (decoder.kv_rows().dtype, counted.item_bytes) == ("bfloat16", 4)


def test_logits_equal_torch(path: Path, monkeypatch: pytest.MonkeyPatch):
    ids = random_tokens(random.Random(1), 2 * CHUNK + 9)
    expected = all_logits(torch_decoder(path), ids)
    for isa in INSTRUCTION_SETS:
        monkeypatch.setenv("FOREWORD_ISA", isa)
        plain = all_logits(cpu_decoder(path, "float32"), ids)
        assert float((plain - expected).abs().max()) <= CLOSE * float(expected.abs().max())
        rounded = all_logits(cpu_decoder(path, "int8"), ids)
        near = (rounded - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert float(near.median()) < 0.25  # small random heads that are normed magnify what rounding changes


def test_a_prefix_hit_and_a_fork_have_the_same_bits(path: Path):
    prompt = random_tokens(random.Random(5), 2 * CHUNK + 30)
    runner, cache = fresh(path)
    expected = all_logits(cpu_decoder(path, "int8"), prompt)
    first = make_request(cache, prompt)
    compute(runner, cache, first, 100)
    compute(runner, cache, first, len(prompt) - 100)
    second, third = (make_request(PagedCache(1), prompt) for _ in range(2))
    second.kv = cache.open(tokens=prompt)
    assert second.kv.computed == 2 * CHUNK
    third.kv = cache.fork(first.kv, len(prompt) - 1)
    for request in (second, third):
        rows = len(prompt) - request.kv.computed
        with Transaction(cache, [PassEntry.of(request, rows)]) as transaction:
            logits = runner.forward(with_all_logits(transaction.batch([Draft()]))).logits
        assert torch.equal(logits, expected[-rows:])


@pytest.mark.parametrize("nodes", [1, 8, 40])
def test_rolling_back_copies_no_state_and_no_row(path: Path, nodes: int):
    """Memory and traffic of states do not depend on depth or width."""
    runner, cache = fresh(path)
    assert isinstance(runner.store, CpuKvStore)
    assert runner.store.states is not None
    assert cache.chunks is not None
    length = CHUNK + 20
    request = make_request(cache, random_tokens(random.Random(2), length))
    compute(runner, cache, request, length - 1)
    used, before = cache.chunks.states_used, runner.store.states.matrices().copy()
    for seed in range(3):
        draft = random_tree(random.Random(seed), nodes, length).within(nodes, 30)
        with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
            batch = transaction.batch([draft])
            runner.forward(batch)
            transaction.commit([Verdict((), (7,))])
        assert not batch.ring_copies
        assert not cache.pending_moves
        assert cache.chunks.states_used == used
    assert (runner.store.states.matrices() == before).all()


def test_a_pass_without_states_is_refused(path: Path):
    runner, cache = fresh(path)
    with Transaction(cache, [PassEntry.of(make_request(cache, [5, 6, 7]), 3)]) as transaction:
        batch = replace(transaction.batch([Draft()]), chunks=())
        with pytest.raises(ValueError, match="no states"):
            runner.forward(batch)


def test_adapters_on_the_projections_of_recurrent_layers(tmp_path: Path):
    path, _ = make_family(tmp_path / "model", "qwen3_5")
    decoder, ids = cpu_decoder(path, "float32"), random_tokens(random.Random(4), CHUNK + 9)
    modules = (*ALL, *(name.rsplit(".", 1)[1] for name in RECURRENT_MODULES if not name.endswith(".in_proj")))
    tensors = adapter_tensors(4, modules, config=decoder.config)
    adapter = open_adapter(
        write_adapter(tmp_path / "adapter", modules=modules, tensors=tensors), decoder.config
    )
    decoder.set_adapter(1, adapter)
    merged = load_file(path / "model.safetensors")
    for (layer, module), factors in adapter.factors.items():
        merged[f"model.layers.{layer}.{module}.weight"] += factors.up @ factors.down
    save_file(merged, path / "model.safetensors", {"format": "pt"})
    expected = all_logits(cpu_decoder(path, "float32"), ids)
    found = adapted_logits(decoder, [(1, ids)])[0]
    assert float((found - expected).abs().max()) <= CLOSE * float(expected.abs().max())


def test_heads_of_an_odd_size_are_refused(tmp_path: Path):
    path, _ = make_family(tmp_path, "qwen3_5", linear_value_head_dim=12)
    with pytest.raises(
        CheckpointError, match="a multiple of 8 values in recurrent layers, not 12; use --backend torch"
    ):
        cpu_decoder(path, "int8")
