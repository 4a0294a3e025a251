"""Every family that the CUDA backend runs: what the torch decoder computes, and the same bits in any company."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.kv_store import TorchKvStore
from foreword.backends.torch.weights import load_weights
from foreword.bench.gpu.engines import timed_engine
from foreword.bench.random_heads import head_drafter, random_head
from foreword.control.fixed import FixedPolicy
from foreword.engine.messages import NewRequest
from foreword.engine.step_pipeline import StepPipeline
from foreword.kv.paged_cache import PagedCache
from foreword.kv.spec import DECODER_ROWS
from foreword.models.adapters import open_adapter
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from helpers.adapters import ALL, MergedCheckpoint, adapter_tensors, write_adapter
from helpers.cuda import (
    EAGER,
    KERNEL_DEVICE,
    has_gpu,
    needs_cuda,
    needs_triton,
)
from helpers.mixed_configs import CONFIGS
from helpers.passes import (
    adapted_logits,
    all_logits,
    compute,
    fragmented_cache,
    make_request,
    with_all_logits,
)
from helpers.random_checkpoint import RandomCheckpoint
from helpers.tiny_families import FAMILIES, HYBRIDS, family_config
from helpers.trees import random_tokens, random_tree, root_path

pytestmark = needs_triton

# Interpreted, a pass is slow: few rows, and one configuration for every feature of the kernels that layers combine.
INTERPRETED = ("windows", "sinks", "caps", "deepseek_v3")
ROWS, WIDEST = (90, None) if has_gpu else (9, 5)
KNOWN = CONFIGS | {family: family_config(family) for family in FAMILIES | HYBRIDS}
RUN_HERE = {
    name: config
    for name, config in KNOWN.items()
    # Hybrids have bounds and tests of their own.
    if (has_gpu or name in INTERPRETED) and name not in HYBRIDS
}


@pytest.fixture(scope="module", params=RUN_HERE)
def checkpoint(request: pytest.FixtureRequest) -> RandomCheckpoint:
    config = RUN_HERE[request.param]
    layers = [
        replace(layer, attention=replace(layer.attention, window=WIDEST))
        if WIDEST is not None and layer.attention.window is not None and layer.attention.window > WIDEST
        else layer
        for layer in config.layers
    ]
    return RandomCheckpoint(replace(config, layers=tuple(layers)))


def decoder_of(checkpoint: RandomCheckpoint, dtype: str = "float32") -> Decoder:
    """With products in parts, as large models have them."""
    from foreword.backends.cuda.decoder import CudaDecoder
    from foreword.backends.cuda.products import Products

    weights = load_weights(checkpoint, getattr(torch, dtype), KERNEL_DEVICE)
    return CudaDecoder(checkpoint.config, weights, Products(least_part=16), enforce_eager=EAGER)


def reference(checkpoint: RandomCheckpoint) -> Decoder:
    return TorchDecoder(checkpoint.config, load_weights(checkpoint, torch.float32, torch.device("cpu")))


def test_logits_equal_torch(checkpoint: RandomCheckpoint):
    ids = random_tokens(random.Random(1), ROWS)  # longer than the windows
    expected = all_logits(reference(checkpoint), ids)
    found = all_logits(decoder_of(checkpoint), ids)
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)


@needs_cuda  # interpreted, the order of sums is NumPy's
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_row_is_the_same_in_chunks_trees_and_beside_others(checkpoint: RandomCheckpoint, dtype: str):
    """Over more than one part of positions, on any pages."""
    rng, count, nodes = random.Random(2), 150, 30
    ids = random_tokens(rng, count + 1)
    decoder = decoder_of(checkpoint, dtype)
    together = all_logits(decoder, ids)
    runner, cache = fragmented_cache(decoder, 24, seed=2)
    request, other = make_request(cache, ids), make_request(cache, random_tokens(rng, 9))
    for rows in (count - 5, 1, 4):
        compute(runner, cache, request, rows)
    draft = random_tree(rng, nodes, len(ids))
    for _ in range(3):  # the second time it is captured, the third replayed
        with Transaction(cache, [PassEntry.of(other, 3), PassEntry.of(request, 1)]) as transaction:
            batch = with_all_logits(transaction.batch([Draft(), draft]))
            logits = runner.forward(batch).logits[3:].cpu()
    assert torch.equal(logits[0], together[count])
    for node in (0, nodes // 2, nodes - 1):
        alone = [draft.tokens[step] for step in root_path(draft, node)]
        assert torch.equal(logits[1 + node], all_logits(decoder, ids + alone)[-1])


@needs_cuda  # interpreted, a text that gives pages back is too long
def test_a_text_goes_on_after_its_first_pages_were_given_to_others():
    """All layers have a window: what others write to the pages that a text gave back is not seen."""
    checkpoint, rng = RandomCheckpoint(CONFIGS["one window"]), random.Random(3)
    chunk, rounds, pages = 29, 11, 12
    ids = random_tokens(rng, chunk * rounds + 2)
    decoder = decoder_of(checkpoint)
    cache = PagedCache(pages, window=decoder.kv_rows().window)
    runner = ModelRunner.allocate(decoder, pages, cache.page_size)
    assert isinstance(runner.store, TorchKvStore)
    for array in runner.store.arrays(DECODER_ROWS):
        array[:, : runner.store.spare_slot] = torch.nan
    request = make_request(cache, ids)
    for _ in range(rounds):
        compute(runner, cache, request, chunk)
        other = make_request(cache, random_tokens(rng, 16))
        compute(runner, cache, other, 16)
        cache.close(other.kv)
    with Transaction(cache, [PassEntry.of(request, 2)]) as transaction:
        logits = runner.forward(with_all_logits(transaction.batch([Draft()]))).logits.cpu()
    expected = all_logits(reference(checkpoint), ids)[-2:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def texts(decoder: Decoder, policy: FixedPolicy) -> list[list[int]]:
    """Answers of two requests, with steps in flight."""
    core = timed_engine(decoder, 4, 2, policy)
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = ((7, 1, 30, 5), (9, 2))
    requests = [core.add(NewRequest(f"r{ids[0]}", ids, params))[0] for ids in prompts]
    pipeline = StepPipeline(core)
    while core.has_requests or pipeline.is_busy:
        pipeline.advance()
    assert not core.faults
    return [list(request.output_ids) for request in requests]


WITH_ALL_HEADS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "qwen3_5", "granite_dense", "lfm2")
HEADS = [
    *((name, method) for name in WITH_ALL_HEADS for method in ("eagle3", "p_eagle", "medusa")),
    *((name, "eagle3") for name in FAMILIES if name not in WITH_ALL_HEADS),
    *((name, "mtp") for name in FAMILIES),
]


@needs_cuda  # interpreted, a draft takes half a minute
@pytest.mark.parametrize(("name", "method"), HEADS)
def test_drafts_of_heads_and_steps_in_flight_change_no_text(name: str, method: str, tmp_path: Path):
    decoder = decoder_of(RandomCheckpoint(replace(KNOWN[name], context_length=512)))
    drafter = head_drafter(decoder, random_head(decoder, method))
    assert texts(decoder, FixedPolicy(drafter, 2)) == texts(decoder, FixedPolicy())


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ADAPTED_HERE = [name for name in FAMILIES if KNOWN[name].layers[0].attention.latent is None]


@pytest.mark.parametrize("name", [name for name in ADAPTED_HERE if has_gpu or name == "gpt_oss"])
def test_adapters_add_what_merged_weights_have(name: str, tmp_path: Path):
    """Beside a row without an adapter, which has the bits that it has alone."""
    config = KNOWN[name]
    modules = [module for module in ALL if module in ATTENTION or not config.layers[-1].mlp.experts]
    tensors = adapter_tensors(4, modules, config=config)
    path = write_adapter(tmp_path / "adapter", 4, modules, tensors=tensors)
    decoder, ids = decoder_of(RandomCheckpoint(config)), random_tokens(random.Random(4), 20 if has_gpu else 2)
    decoder.set_adapter(1, open_adapter(path, config))
    for _ in range(3 if has_gpu else 1):  # the second time it is captured, the third replayed
        found, plain = adapted_logits(decoder, [(1, ids), (0, ids[:1])])
    expected = all_logits(reference(MergedCheckpoint(path, config)), ids)
    tolerance = 1e-4 * float(expected.abs().max())
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=0)
    alone = all_logits(decoder, ids[:1])
    assert (found[0].cpu() - alone).abs().max() > 10 * tolerance
    assert torch.equal(plain.cpu(), alone) or not has_gpu
