"""A row's result is bit-identical however it is computed: neighbours, chunks, pages, trees and threads.

This is what lets speculation promise identical text, so nothing here has a tolerance.
"""

import importlib
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.batch import Tap
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.engine.requests.request import Request
from foreword.kernels.native import TILED_ISA
from foreword.kv.paged_cache import PagedCache
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.speculation.draft import Draft
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry, Verdict
from foreword.speculation.transaction import Transaction
from helpers.cpu import INSTRUCTION_SETS, cpu_decoder, needs_amx, needs_cpu_kernels
from helpers.cuda import CUDA_DTYPES, cuda_decoder, needs_cuda
from helpers.passes import all_logits, compute, fragmented_cache, make_request, with_all_logits
from helpers.tiny_families import make_family
from helpers.tiny_models import make_hf_model
from helpers.trees import random_tokens, random_tree, root_path

SHAPES = {
    "even": ("llama", {}),
    "odd": (
        "qwen3",
        {
            "hidden_size": 72,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 20,
            "intermediate_size": 100,
        },
    ),
    "biased": ("qwen2", {"hidden_size": 192, "num_attention_heads": 3, "num_key_value_heads": 3}),
}
SMALL_FAMILIES = ["qwen3_5", "nemotron_h", "lfm2", "deepseek_v2", "deepseek_v3"]
"""One family of every recurrence, gated attention, layers of one part, and latent attention."""

FORMS = ["int8", "q8_0", "float32"]


FORMS_AND_THREADS = [
    *((form, INSTRUCTION_SETS[0], 2) for form in FORMS),
    *((FORMS[at % len(FORMS)], isa, 5) for at, isa in enumerate(INSTRUCTION_SETS) if at),
]
"""All forms with one instruction set, and every other set with one form."""


def cpu_decoder_with_int8_kv(path: Path, form: str) -> Decoder:
    return cpu_decoder(path, form, kv_dtype="int8")


DECODERS = [
    *(pytest.param((cpu_decoder, form), marks=needs_cpu_kernels, id=f"cpu-{form}") for form in FORMS),
    pytest.param((cpu_decoder_with_int8_kv, "int8"), marks=needs_cpu_kernels, id="cpu-int8-int8-kv"),
    *(pytest.param((cuda_decoder, dtype), marks=needs_cuda, id=f"cuda-{dtype}") for dtype in CUDA_DTYPES),
]


@pytest.fixture(scope="module", params=[*SHAPES, *SMALL_FAMILIES])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param in SMALL_FAMILIES:
        return make_family(tmp_path_factory.mktemp("model"), request.param)[0]
    architecture, overrides = SHAPES[request.param]
    return make_hf_model(tmp_path_factory.mktemp("model"), architecture, tied=True, **overrides)


@pytest.fixture(scope="module", params=DECODERS)
def decoder(request: pytest.FixtureRequest, path: Path) -> Decoder:
    load, numbers = request.param
    if load is cpu_decoder_with_int8_kv and open_checkpoint(path).config.layers[0].attention.latent:
        pytest.skip("latent rows are not kept in int8")
    decoder: Decoder = load(path, numbers)
    assert decoder.is_shape_invariant
    return decoder


def one_by_one(decoder: Decoder, ids: list[int], seed: int = 0) -> torch.Tensor:
    """Logits after every token when each comes alone."""
    runner, cache = fragmented_cache(decoder, -(-len(ids) // 16) + 3, seed)
    request = make_request(cache, ids)
    return torch.cat([run(runner, cache, request, 1) for _ in ids])


def run(runner: ModelRunner, cache: PagedCache, request: Request, rows: int) -> torch.Tensor:
    """Compute the next committed tokens of a request and give all their logits."""
    with Transaction(cache, [PassEntry.of(request, rows)]) as transaction:
        logits = runner.forward(with_all_logits(transaction.batch([Draft()]))).logits.cpu()
        transaction.commit([NOTHING_DRAWN])
    return logits


def paths_alone(
    decoder: Decoder, prompt: list[int], draft: Draft
) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Every path through a tree, and the logits of its nodes when it is typed after the prompt, in one pass."""
    for leaf in set(range(len(draft))).difference(draft.parents):
        nodes = root_path(draft, leaf)
        alone = prompt + [draft.tokens[node] for node in nodes]
        yield nodes, all_logits(decoder, alone)[-len(nodes) :]


def test_one_pass_equals_one_token_at_a_time(decoder: Decoder):
    ids = random_tokens(random.Random(1), 100)
    assert torch.equal(all_logits(decoder, ids), one_by_one(decoder, ids))


@pytest.mark.parametrize("seed", range(2))
def test_chunks_of_any_size_on_any_pages(decoder: Decoder, seed: int):
    rng = random.Random(seed)
    ids = random_tokens(rng, rng.choice([33, 64, 97, 140]))
    expected = all_logits(decoder, ids)
    runner, cache = fragmented_cache(decoder, 12, seed)
    request = make_request(cache, ids)
    parts = []
    while (done := request.kv.computed) < len(ids):
        parts.append(
            run(runner, cache, request, min(rng.choice([1, 2, 3, 5, 7, 16, 31, 63]), len(ids) - done))
        )
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("seed", range(2))
def test_every_tree_node_equals_its_path_typed_alone(decoder: Decoder, seed: int):
    rng = random.Random(100 + seed)
    prompt = random_tokens(rng, rng.choice([1, 15, 16, 31, 37, 60]))
    nodes = rng.choice([1, 5, 20, 64])
    runner, cache = fragmented_cache(decoder, 12, seed)
    request = make_request(cache, prompt)
    if len(prompt) > 1:
        compute(runner, cache, request, len(prompt) - 1)
    draft = random_tree(rng, nodes, len(prompt)).within(nodes, cache.max_draft_depth(len(prompt) - 1))
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        tree = runner.forward(with_all_logits(transaction.batch([draft]))).logits.cpu()
    for nodes_of_path, expected in paths_alone(decoder, prompt, draft):
        assert torch.equal(tree[[1 + node for node in nodes_of_path]], expected)


def test_hidden_states_do_not_depend_on_what_runs_beside_them(decoder: Decoder):
    last = decoder.config.num_layers
    taps = (Tap(0), Tap(1), Tap(last), Tap(last, normed=True))
    ids, other = random_tokens(random.Random(11), 50), random_tokens(random.Random(12), 20)

    def hidden(runs: list[int], *texts: list[int]) -> list[torch.Tensor]:
        """Of the first text's rows, in chunks of these sizes beside the other texts."""
        runner, cache = fragmented_cache(decoder, 12, seed=1)
        first, *beside = [make_request(cache, text) for text in texts]
        found: list[list[torch.Tensor]] = [[] for _ in taps]
        for run in runs:
            scheduled = [PassEntry.of(first, run), *(PassEntry.of(request, 2) for request in beside)]
            with Transaction(cache, scheduled) as transaction:
                rows = torch.arange(run, dtype=torch.int32)
                batch = replace(transaction.batch([Draft()] * len(scheduled)), hidden_rows=rows, taps=taps)
                states = runner.forward(batch).hidden
                transaction.commit([NOTHING_DRAWN] * len(scheduled))
            for place, tap in enumerate(taps):
                found[place].append(states[tap])
        return [torch.cat(parts) for parts in found]

    expected = hidden([50], ids)
    assert not torch.equal(expected[2], expected[3])
    for ours, theirs in zip(hidden([1, 16, 3, 30], ids, other), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("seed", range(2))
def test_a_moved_path_continues_as_if_it_had_been_typed(decoder: Decoder, seed: int):
    rng = random.Random(200 + seed)
    prompt = random_tokens(rng, 30)
    runner, cache = fragmented_cache(decoder, 12, seed)
    request = make_request(cache, prompt)
    compute(runner, cache, request, len(prompt) - 1)
    draft = random_tree(rng, 40, len(prompt))
    path = root_path(draft, max(range(40), key=lambda node: len(root_path(draft, node))))
    assert path != list(range(len(path))), "the path must need moves"
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        runner.forward(transaction.batch([draft]))
        transaction.commit([Verdict(tuple(path), (*(draft.tokens[node] for node in path), 11))])
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        continued = runner.forward(with_all_logits(transaction.batch([Draft()]))).logits.cpu()
    assert torch.equal(continued[-1], all_logits(decoder, request.tokens)[-1])


@pytest.mark.parametrize("seed", range(2))
def test_a_mixed_batch_in_any_order_equals_every_request_alone(decoder: Decoder, seed: int):
    rng = random.Random(300 + seed)
    lengths = [50, 21, 1, 33, 65][: rng.randint(2, 5)]
    rng.shuffle(lengths)
    prompts = [random_tokens(rng, length) for length in lengths]
    runs = [rng.choice([1, min(20, len(prompt)), len(prompt)]) for prompt in prompts]
    runner, cache = fragmented_cache(decoder, 40, seed)
    drafts = [
        random_tree(rng, rng.randint(0, 20), len(prompt)).within(20, cache.max_draft_depth(len(prompt) - 1))
        if count == 1
        else Draft()
        for prompt, count in zip(prompts, runs, strict=True)
    ]
    requests = [make_request(cache, prompt) for prompt in prompts]
    for request, prompt, count in zip(requests, prompts, runs, strict=True):
        if len(prompt) > count:
            compute(runner, cache, request, len(prompt) - count)
    shares = [PassEntry.of(request, count) for request, count in zip(requests, runs, strict=True)]
    with Transaction(cache, shares) as transaction:
        batch = with_all_logits(transaction.batch(drafts))
        logits = runner.forward(batch).logits.cpu()
    starts = batch.row_starts.tolist()
    for index, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
        rows = logits[starts[index] : starts[index + 1]]
        assert torch.equal(rows[: runs[index]], all_logits(decoder, prompt)[-runs[index] :])
        for nodes, expected in paths_alone(decoder, prompt, draft):
            assert torch.equal(rows[[runs[index] + node for node in nodes]], expected)


@needs_cpu_kernels
@pytest.mark.parametrize(("form", "isa", "threads"), FORMS_AND_THREADS)
def test_any_number_of_threads(
    path: Path, form: str, isa: str, threads: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    ids = random_tokens(random.Random(7), 90)
    expected = all_logits(cpu_decoder(path, form, threads=1), ids)
    decoder = cpu_decoder(path, form, threads=threads)
    assert decoder.threads == threads
    assert torch.equal(all_logits(decoder, ids), expected)
    assert torch.equal(one_by_one(decoder, ids[:12]), expected[:12])


@needs_cpu_kernels
@pytest.mark.parametrize("form", FORMS[:2])
def test_passes_on_both_sides_of_the_crossover_to_tiles(path: Path, form: str):
    ids = random_tokens(random.Random(8), 200)
    decoder = cpu_decoder(path, form)
    expected = all_logits(decoder, ids)
    _native = importlib.import_module("foreword.kernels._native")
    for crossover in (_native.MIN_TILED_TOKENS, _native.MIN_TILED_BLOCK_TOKENS):
        runner, cache = fragmented_cache(decoder, 16, crossover)
        request = make_request(cache, ids)
        parts = [run(runner, cache, request, rows) for rows in (1, crossover - 1, crossover, crossover + 1)]
        assert torch.equal(torch.cat(parts), expected[: 1 + 3 * crossover])


@needs_amx
@pytest.mark.parametrize("form", FORMS[:2])
def test_passes_in_tiles_equal_those_without(path: Path, form: str, monkeypatch: pytest.MonkeyPatch):
    ids = random_tokens(random.Random(9), 70)
    logits = []
    for isa in ("avx512-vnni", TILED_ISA):
        monkeypatch.setenv("FOREWORD_ISA", isa)
        decoder = cpu_decoder(path, form)
        assert decoder.isa == isa
        logits.append(all_logits(decoder, ids))
    assert torch.equal(*logits)


@needs_cpu_kernels
@pytest.mark.model
@pytest.mark.parametrize("form", ["int8", "q4"])
def test_smollm2_is_invariant_too(default_model: Path, form: str):
    decoder = cpu_decoder(default_model, form, threads=2)
    rng = random.Random(4)
    ids = [rng.randrange(decoder.config.vocab_size) for _ in range(90)]
    expected = all_logits(decoder, ids)
    assert torch.equal(one_by_one(decoder, ids[:16]), expected[:16])
    single = cpu_decoder(default_model, form, threads=1)
    assert torch.equal(all_logits(single, ids), expected)
    runner, cache = fragmented_cache(decoder, 12, seed=1)
    request = make_request(cache, ids[:70])
    compute(runner, cache, request, 69)
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        chain = runner.forward(with_all_logits(transaction.batch([Draft.chain(ids[70:86], 70)]))).logits
    assert torch.equal(chain, expected[69:86])
