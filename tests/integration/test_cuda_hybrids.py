"""Models with recurrent layers on the CUDA backend: torch's logits, and the same bits however rows are computed."""

import random
from pathlib import Path

import pytest
import torch

from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.engine.requests.request import Request
from foreword.kv.chunks import CHUNK
from foreword.kv.paged_cache import PagedCache
from foreword.models.adapters import layer_modules, open_adapter
from foreword.speculation.draft import Draft
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry, Verdict
from foreword.speculation.transaction import Transaction
from helpers.adapters import adapter_tensors, write_adapter
from helpers.cuda import EAGER, KERNEL_DEVICE, has_gpu, needs_cuda, needs_triton
from helpers.passes import (
    adapted_logits,
    all_logits,
    compute,
    fragmented_cache,
    make_request,
    with_all_logits,
)
from helpers.random_checkpoint import RandomCheckpoint
from helpers.tiny_families import HYBRIDS, family_config
from helpers.trees import random_tokens, random_tree, root_path

pytestmark = needs_triton

KINDS = ["qwen3_5", "granite_dense", "lfm2"]  # of recurrences


def made(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    from foreword.backends.cuda.decoder import CudaDecoder
    from foreword.backends.cuda.products import Products

    checkpoint = RandomCheckpoint(family_config(name))
    weights = load_weights(checkpoint, dtype, KERNEL_DEVICE)
    return CudaDecoder(checkpoint.config, weights, Products(least_part=16), enforce_eager=EAGER)


def reference(name: str) -> Decoder:
    checkpoint = RandomCheckpoint(family_config(name))
    weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))
    return TorchDecoder(checkpoint.config, weights)


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture(scope="module", params=KINDS)
def decoder(request: pytest.FixtureRequest, dtype: torch.dtype) -> Decoder:
    return made(request.param, dtype)


def run(runner: ModelRunner, cache: PagedCache, request: Request, rows: int) -> torch.Tensor:
    """Compute the next committed tokens of a request and give all their logits."""
    with Transaction(cache, [PassEntry.of(request, rows)]) as transaction:
        logits = runner.forward(with_all_logits(transaction.batch([Draft()]))).logits.cpu()
        transaction.commit([NOTHING_DRAWN])
    return logits


@pytest.mark.parametrize("name", HYBRIDS if has_gpu else ["qwen3_5", "nemotron_h"])
def test_logits_equal_torch(name: str):
    ids = random_tokens(random.Random(1), 2 * CHUNK + 20 if has_gpu else 9)
    expected = all_logits(reference(name), ids)
    differ = (all_logits(made(name), ids) - expected).abs().amax(1) / expected.abs().max()
    # Some rows amplify rounding: torch's own passes of 7 and of 148 rows differ by up to 6e-5 there.
    assert differ.median() < 1e-5
    assert differ.max() < 1e-3


@pytest.mark.parametrize("name", [*KINDS, "nemotron_h"] if has_gpu else ["qwen3_5", "nemotron_h"])
def test_adapters_on_all_projections(name: str, tmp_path: Path):
    ours, theirs = made(name), reference(name)
    config, ids = ours.config, random_tokens(random.Random(4), 9)
    of_layers = [layer_modules(config, layer) for layer in range(config.num_layers)]
    modules = sorted({module.rsplit(".", 1)[1] for found in of_layers for module in found})
    tensors = adapter_tensors(4, modules, config=config)
    path = write_adapter(tmp_path, modules=modules, tensors=tensors)
    for decoder in (ours, theirs):
        decoder.set_adapter(1, open_adapter(path, config))
    expected = adapted_logits(theirs, [(1, ids), (0, ids)])
    for found, wanted in zip(adapted_logits(ours, [(1, ids), (0, ids)]), expected, strict=True):
        assert (found.cpu() - wanted).abs().max() < 1e-4 * wanted.abs().max()


@needs_cuda  # interpreted, this takes minutes
@pytest.mark.parametrize("seed", range(2))
def test_passes_of_any_size(decoder: Decoder, seed: int):
    rng = random.Random(seed)
    ids = random_tokens(rng, 2 * CHUNK + 22)
    expected = all_logits(decoder, ids)
    runner, cache = fragmented_cache(decoder, 12, seed)
    request = make_request(cache, ids)
    parts = []
    while (done := request.kv.computed) < len(ids):
        rows = 1 if seed == 0 else min(rng.choice([1, 2, 7, 31, 63, 64, 65]), len(ids) - done)
        parts.append(run(runner, cache, request, rows))
    assert torch.equal(torch.cat(parts), expected)


@needs_cuda
@pytest.mark.parametrize("length", [1, CHUNK - 9, CHUNK, 2 * CHUNK + 20])
def test_trees_what_is_committed_of_them_and_what_is_rolled_back(decoder: Decoder, length: int):
    rng = random.Random(length)
    prompt = random_tokens(rng, length)
    runner, cache = fragmented_cache(decoder, 24, length)
    request, other = make_request(cache, prompt), make_request(cache, random_tokens(rng, 70))
    if length > 1:
        compute(runner, cache, request, length - 1)
    draft = random_tree(rng, 20, length).within(20, cache.max_draft_depth(length - 1))
    paths = [root_path(draft, node) for node in range(len(draft))]
    longest: list[int] = max(paths, key=len, default=[])
    found = []
    for is_committed in (False, False, True):  # captured the second time, replayed the third
        with Transaction(cache, [PassEntry.of(request, 1), PassEntry.of(other, 3)]) as transaction:
            found.append(
                runner.forward(with_all_logits(transaction.batch([draft, Draft()]))).logits[:-3].cpu()
            )
            if is_committed:
                accepted = tuple(draft.tokens[node] for node in longest)
                transaction.commit([Verdict(tuple(longest), (*accepted, 11)), NOTHING_DRAWN])
    for logits in found:
        for node, path in enumerate([[], *paths]):
            alone = prompt + [draft.tokens[step] for step in path]
            assert torch.equal(logits[node], all_logits(decoder, alone)[-1])
    assert torch.equal(run(runner, cache, request, 1)[-1], all_logits(decoder, request.tokens)[-1])


@needs_cuda
def test_chains_beside_prompts_and_other_requests(decoder: Decoder):
    rng = random.Random(8)
    texts = [random_tokens(rng, length) for length in (70, 5, 150)]
    runner, cache = fragmented_cache(decoder, 40, 8)
    requests = [make_request(cache, text) for text in texts]
    compute(runner, cache, requests[2], 149)
    drafted = random_tokens(rng, 9)
    entries = [PassEntry.of(request, len(request.tokens) - request.kv.computed) for request in requests]
    with Transaction(cache, entries) as transaction:
        transaction.reserve()
        drafts = [Draft(), Draft(), Draft.chain(drafted, 150)]
        logits = runner.forward(with_all_logits(transaction.batch(drafts))).logits.cpu()
    first, second, third = logits.split([70, 5, 10])
    assert torch.equal(first, all_logits(decoder, texts[0]))
    assert torch.equal(second, all_logits(decoder, texts[1]))
    assert torch.equal(third, all_logits(decoder, texts[2] + drafted)[149:])
