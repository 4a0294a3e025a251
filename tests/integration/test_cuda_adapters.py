"""Adapters on the CUDA backend: what merging them would give, and the same numbers whatever runs beside a row."""

import random
from pathlib import Path

import pytest
import torch

from foreword.backends.choice import BackendChoice
from foreword.errors import RequestError
from foreword.models.adapters import open_adapter
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from helpers.adapters import ADAPTED, ALL, MergedCheckpoint, decoder_of, write_adapter
from helpers.cuda import EAGER, KERNEL_DEVICE, assert_same_row, has_gpu, needs_cuda, needs_triton
from helpers.passes import adapted_logits, all_logits, compute, fragmented_cache, make_request
from helpers.random_checkpoint import RandomCheckpoint

pytestmark = needs_triton


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ADAPTED.vocab_size) for _ in range(count)]


def cuda_decoder(dtype: torch.dtype = torch.float32, quantization: str = "none"):
    from foreword.backends.cuda.decoder import CudaDecoder
    from foreword.backends.cuda.packing import load_packed

    choice = BackendChoice("cuda", None, dtype, "", quantization)
    weights = load_packed(RandomCheckpoint(ADAPTED), choice, KERNEL_DEVICE)
    return CudaDecoder(ADAPTED, weights, enforce_eager=EAGER)


@pytest.mark.parametrize(
    ("rank", "modules"),
    [(17, ALL), *([(128, ("k_proj", "down_proj")), (1, ("up_proj",))] if has_gpu else [])],
)
def test_logits_are_those_of_merged_weights(rank: int, modules: tuple[str, ...], tmp_path: Path):
    path = write_adapter(tmp_path / "adapter", rank, modules)
    decoder, ids = cuda_decoder(), tokens(40 if has_gpu else 2)  # interpreted, every row takes seconds
    decoder.set_adapter(2, open_adapter(path, ADAPTED))
    found, plain = adapted_logits(decoder, [(2, ids), (0, ids[:1])])
    torch.testing.assert_close(
        found.cpu(), all_logits(decoder_of("torch", MergedCheckpoint(path)), ids), atol=2e-4, rtol=0
    )
    torch.testing.assert_close(plain.cpu(), all_logits(decoder_of("torch"), ids[:1]), atol=2e-4, rtol=0)


@pytest.mark.parametrize("quantization", ["fp8", "int4"] if has_gpu else ["fp8"])
def test_adapters_add_to_packed_weights_what_they_add_to_others(quantization: str, tmp_path: Path):
    path = write_adapter(tmp_path / "adapter", 17, ALL)
    decoder, ids = cuda_decoder(quantization=quantization), tokens(40 if has_gpu else 2)
    decoder.set_adapter(1, open_adapter(path, ADAPTED))
    found, plain = (logits.cpu() for logits in adapted_logits(decoder, [(1, ids), (0, ids)]))
    merged, unmerged = (
        all_logits(decoder_of("torch", MergedCheckpoint(path)), ids),
        all_logits(decoder_of("torch"), ids),
    )
    assert (plain - unmerged).abs().max() > 1e-3, "weights are rounded"
    added, expected = (found - plain).flatten(), (merged - unmerged).flatten()
    assert torch.nn.functional.cosine_similarity(added, expected, dim=0) > 0.9


@pytest.mark.parametrize("quantization", ["none", "fp8", "int4"] if has_gpu else ["none"])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16] if has_gpu else [pytest.param(torch.float32, marks=pytest.mark.slow)],
)
def test_a_row_is_the_same_whatever_adapters_run_beside_it(
    dtype: torch.dtype, quantization: str, tmp_path: Path
):
    decoder = cuda_decoder(dtype, quantization)
    for slot, (rank, modules) in enumerate([(4, ALL), (33, ("q_proj", "down_proj"))], start=1):
        path = write_adapter(tmp_path / str(slot), rank, modules, seed=slot)
        decoder.set_adapter(slot, open_adapter(path, ADAPTED))
    parts = [(slot, tokens(count, seed=count)) for slot, count in [(1, 1), (0, 2), (2, 3)]]
    together = adapted_logits(decoder, parts)
    for part, found in zip(parts, together, strict=True):
        for _ in range(3 if has_gpu else 1):  # the second time it is captured, the third replayed
            assert_same_row(adapted_logits(decoder, [part])[0], found)


def test_a_slot_that_is_empty_or_too_many_is_refused(tmp_path: Path):
    decoder = cuda_decoder()
    with pytest.raises(ValueError, match="has no adapter"):
        adapted_logits(decoder, [(3, tokens(2))])
    with pytest.raises(RequestError, match="at most 256 adapters at a time"):
        decoder.set_adapter(257, open_adapter(write_adapter(tmp_path / "a"), ADAPTED))


@needs_cuda
def test_a_captured_pass_finds_the_adapter_that_is_there_now(tmp_path: Path):
    first, second = (
        open_adapter(write_adapter(tmp_path / str(seed), 8, seed=seed), ADAPTED) for seed in (1, 2)
    )
    decoder, fresh = cuda_decoder(torch.bfloat16), cuda_decoder(torch.bfloat16)
    runner, cache = fragmented_cache(decoder, 8, seed=1)
    request = make_request(cache, tokens(20))
    compute(runner, cache, request, 19)
    request.adapter_slot = 1
    found = []
    for adapter in (first, first, first, None, second):
        decoder.set_adapter(1, adapter)
        if adapter is not None:
            with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
                found.append(runner.forward(transaction.batch([Draft()])).logits.clone())
    assert EAGER or decoder._graphs.of(runner.store).captured == 1
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[2], found[3])
    fresh.set_adapter(1, second)
    runner, cache = fragmented_cache(fresh, 8, seed=1)
    request = make_request(cache, tokens(20))
    compute(runner, cache, request, 19)
    request.adapter_slot = 1
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        assert torch.equal(runner.forward(transaction.batch([Draft()])).logits, found[3])
