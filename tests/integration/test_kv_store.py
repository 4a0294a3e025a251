"""KV memory belongs to stores: several for one decoder, with rows of others that move together with its own."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.interface import Decoder, KvStore
from foreword.backends.runner import ModelRunner
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.kv.spec import DECODER_ROWS, RowSpec
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from helpers.cpu import INSTRUCTION_SETS, cpu_decoder, needs_cpu_kernels
from helpers.passes import all_logits, compute, make_request, torch_decoder, with_all_logits
from helpers.tiny_families import make_family
from helpers.tiny_models import make_hf_model
from helpers.trees import random_tokens

HEAD = RowSpec("head", num_layers=1, num_kv_heads=3, head_dim=10)
PAGES = 4
KV_NUMBERS = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 20}
    return make_hf_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True, **shape)


@pytest.fixture(params=["torch", *(pytest.param(kind, marks=needs_cpu_kernels) for kind in KV_NUMBERS)])
def decoder(request: pytest.FixtureRequest, path: Path) -> Decoder:
    if request.param == "torch":
        return torch_decoder(path)
    return cpu_decoder(path, "float32", kv_dtype=request.param)


def row(store: KvStore, name: str, slot: int, dim: int) -> torch.Tensor:
    """Keys and values of one physical row in all layers, whatever the layout: [2, layers, heads, dim]."""
    keys, values = store.arrays(name)
    if keys.dim() == 4:  # [layers, rows, heads, dim]
        return torch.stack([keys[:, slot], values[:, slot]]).clone()
    page, offset = divmod(slot, store.page_size)
    return torch.stack([keys[:, page, :, :dim, offset], values[:, page, :, offset, :dim]]).clone()


def fill(store: KvStore, name: str) -> None:
    for place, array in enumerate(store.arrays(name)):
        array.copy_(torch.randn(array.shape, generator=torch.Generator().manual_seed(place)))


def test_two_stores_of_one_decoder_know_nothing_of_each_other(decoder: Decoder):
    texts = [random_tokens(random.Random(seed), 40) for seed in (1, 2)]
    caches = [PagedCache(PAGES) for _ in texts]  # the same pages, in different memory
    runners = [ModelRunner.allocate(decoder, PAGES, 16) for _ in texts]
    requests = [make_request(cache, text) for cache, text in zip(caches, texts, strict=True)]
    for rows in (16, 7, 16):
        for runner, cache, request in zip(runners, caches, requests, strict=True):
            compute(runner, cache, request, rows)
    for runner, cache, request, text in zip(runners, caches, requests, texts, strict=True):
        with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
            logits = runner.forward(with_all_logits(transaction.batch([Draft()]))).logits
        torch.testing.assert_close(logits[0], all_logits(decoder, text)[-1], atol=1e-4, rtol=0)


def test_a_store_takes_as_much_memory_as_it_says(decoder: Decoder):
    store = decoder.new_kv_store(PAGES, 16, [HEAD])
    assert store.bytes_per_row == store.spec.bytes_per_row
    held = [array for kind in store.spec.rows for array in store.arrays(kind.name)]
    spare = 2 if held[0].dim() == 4 else 0  # rows behind the pages
    assert sum(array.nbytes for array in held) == store.bytes_per_row * (PAGES * 16 + spare)
    assert (store.num_pages, store.page_size) == (PAGES, 16)
    assert [kind.name for kind in store.spec.rows] == [DECODER_ROWS, "head"]


COPIES = [
    [(5, 0), (6, 1), (7, 2)],
    [(1, 0), (2, 1), (3, 2)],  # a path that overlaps itself
    [(0, 17), (17, 0)],  # both are read before either is written
    [],
]


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("by_a_pass", [True, False])
def test_rows_of_all_kinds_move_together(
    decoder: Decoder, copies: Sequence[tuple[int, int]], by_a_pass: bool
):
    store = decoder.new_kv_store(PAGES, 16, [HEAD])
    dims = {DECODER_ROWS: decoder.config.layer.attention.head_dim, "head": HEAD.head_dim}
    for name in dims:
        fill(store, name)
    before = {(name, slot): row(store, name, slot, dim) for name, dim in dims.items() for slot in range(64)}
    moves = torch.tensor(copies, dtype=torch.int32).reshape(-1, 2)
    written = set()
    if by_a_pass:
        cache = PagedCache(PAGES)
        taken = cache.open()
        cache.reserve(taken, 48)  # so that the pass writes elsewhere
        with Transaction(cache, [PassEntry.of(make_request(cache, [1, 2, 3]), 3)]) as transaction:
            batch = replace(transaction.batch([Draft()]), kv_copies=moves)
            decoder.forward(batch, store)
        written = {(DECODER_ROWS, slot) for slot in batch.slots.tolist()}
    else:
        store.move(moves)
    source = {target: source for source, target in copies}
    for name, slot in before.keys() - written:
        expected = before[name, source.get(slot, slot)]
        assert torch.equal(row(store, name, slot, dims[name]), expected), (name, slot)


@needs_cpu_kernels
def test_both_backends_keep_the_same_numbers(path: Path):
    stores = []
    for decoder in (torch_decoder(path), cpu_decoder(path, "float32")):
        cache = PagedCache(PAGES)
        runner = ModelRunner.allocate(decoder, PAGES, 16)
        compute(runner, cache, make_request(cache, random_tokens(random.Random(3), 40)), 40)
        stores.append(runner.store)
    for slot in range(40):
        ours, theirs = (row(store, DECODER_ROWS, slot, 20) for store in stores)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@needs_cpu_kernels
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_rows_in_16_bits_are_the_rounded_ones(path: Path, isa: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    ids, kept, logits = random_tokens(random.Random(3), 40), [], []
    for numbers in KV_NUMBERS:
        decoder = cpu_decoder(path, "float32", kv_dtype=numbers)
        cache, runner = PagedCache(PAGES), ModelRunner.allocate(decoder, PAGES, 16)
        with Transaction(cache, [PassEntry.of(make_request(cache, ids), 40)]) as transaction:
            logits.append(runner.forward(with_all_logits(transaction.batch([Draft()]))).logits)
        kept.append(runner.store)
    whole, half = kept
    assert half.bytes_per_row * 2 == whole.bytes_per_row
    for slot in range(40):  # later layers read rounded rows of the first
        ours, theirs = (row(store, DECODER_ROWS, slot, 20)[:, 0] for store in (half, whole))
        assert torch.equal(ours, theirs.to(ours.dtype))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.01


@needs_cpu_kernels
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_rows_in_int8_are_rounded_with_a_scale_each(path: Path, isa: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    ids, kept, logits = random_tokens(random.Random(3), 40), [], []
    for numbers in ("float32", "int8"):
        decoder = cpu_decoder(path, "float32", kv_dtype=numbers)
        cache, runner = PagedCache(PAGES), ModelRunner.allocate(decoder, PAGES, 16)
        with Transaction(cache, [PassEntry.of(make_request(cache, ids), 40)]) as transaction:
            logits.append(runner.forward(with_all_logits(transaction.batch([Draft()]))).logits)
        kept.append(runner.store)
    whole, bytes_kept = kept
    assert bytes_kept.bytes_per_row == bytes_kept.spec.bytes_per_row == 2 * 2 * 2 * (24 + 4)  # and a scale
    for slot in range(40):  # later layers read rounded rows of the first
        levels, exact = (row(store, DECODER_ROWS, slot, 20)[:, 0] for store in (bytes_kept, whole))
        largest = exact.abs().amax(-1, keepdim=True)
        assert torch.equal(levels.float(), (exact * (127 / largest)).round())
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert 0 < error < 0.03


@needs_cpu_kernels
def test_scales_move_with_rows_in_int8(path: Path):
    """The rows of one text, copied to other slots, are read as they were."""
    decoder = cpu_decoder(path, "int8", kv_dtype="int8")
    ids = random_tokens(random.Random(3), 20)
    cache, runner = PagedCache(PAGES), ModelRunner.allocate(decoder, PAGES, 16)
    request = make_request(cache, ids)
    compute(runner, cache, request, 19)
    moves = [(slot, 63 - slot) for slot in range(19)]
    runner.store.move(torch.tensor(moves, dtype=torch.int32))
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        batch = transaction.batch([Draft()])
        back = torch.tensor([(to, slot) for slot, to in moves], dtype=torch.int32)
        for array in runner.store.arrays(DECODER_ROWS):
            array[:, :2] = 0
        logits = decoder.forward(replace(batch, kv_copies=back), runner.store).logits
    assert torch.equal(logits[0], all_logits(decoder, ids)[-1])


@needs_cpu_kernels
def test_what_cannot_be_kept_in_int8_is_refused_in_one_line(tmp_path: Path):
    directory, _ = make_family(tmp_path, "deepseek_v2")
    with pytest.raises(RequestError, match="cannot be kept in 8 bits; leave out --kv-cache-dtype") as caught:
        cpu_decoder(directory, "int8", kv_dtype="int8")
    assert "\n" not in str(caught.value)


def test_the_store_of_another_decoder_is_refused(decoder: Decoder):
    other = decoder.with_layers([0])
    cache = PagedCache(PAGES)
    with Transaction(cache, [PassEntry.of(make_request(cache, [1, 2, 3]), 3)]) as transaction:
        batch = transaction.batch([Draft()])
        with pytest.raises(ValueError, match="another decoder"):
            decoder.forward(batch, other.new_kv_store(PAGES, 16))


@needs_cpu_kernels
def test_arrays_of_the_cpu_store_outlive_it(path: Path):
    store = cpu_decoder(path, "int8").new_kv_store(PAGES, 16, [HEAD])
    keys, values = store.arrays("head")
    del store
    keys.fill_(1.0)
    values.fill_(2.0)
    assert keys.sum() == keys.numel()


@needs_cpu_kernels
def test_what_the_cpu_kernels_cannot_keep_is_refused_by_name(path: Path):
    decoder = cpu_decoder(path, "int8")
    with pytest.raises(RequestError, match="short"):
        decoder.new_kv_store(PAGES, 16, [RowSpec("short", 1, 1, 64, value_dim=32)])
    with pytest.raises(ValueError, match="outside"):
        decoder.new_kv_store(PAGES, 16).move(torch.tensor([[0, 64]], dtype=torch.int32))
