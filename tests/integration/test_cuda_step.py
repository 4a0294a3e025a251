"""The torch decoder as a GPU runs it: padded sizes, one staged copy, no waiting. On the CPU, the padding alone."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.batch import Tap
from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.staging import Staging
from foreword.backends.torch.weights import load_weights
from foreword.engine.requests.request import Request
from foreword.kv.paged_cache import PagedCache
from foreword.kv.spec import DECODER_ROWS
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.speculation.draft import Draft
from foreword.speculation.layout import BatchBuffers, SequenceRows
from helpers.passes import DEVICES, make_request
from helpers.tiny_models import make_hf_model
from helpers.trees import random_tokens, random_tree

PAGES = 120


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


def make_runner(path: Path, device: str, bucketed: bool) -> ModelRunner:
    checkpoint = open_checkpoint(path)
    weights = load_weights(checkpoint, torch.float32, torch.device(device))
    decoder = TorchDecoder(checkpoint.config, weights, bucketed=bucketed)
    runner = ModelRunner.allocate(decoder, PAGES, 16)
    for memory in runner.store.arrays(DECODER_ROWS):
        memory[:, : PAGES * 16] = torch.nan  # what nobody has written must not matter
    return runner


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Any wait of the host for the GPU is an error, as far as torch can see it."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Pair:
    """A padded decoder and the plain one on the CPU, given the same passes."""

    def __init__(self, path: Path, device: str) -> None:
        self.device = device
        self.plain, self.padded = make_runner(path, "cpu", False), make_runner(path, device, True)
        self.cache, self.buffers = PagedCache(PAGES), BatchBuffers(entries=64)

    def run(self, shares: Sequence[SequenceRows], hidden_rows: Sequence[int] = ()) -> None:
        """One pass on both, compared; then the runs are final."""
        batch = self.buffers.lay_out(self.cache, shares, self.cache.take_moves())
        rows = torch.tensor(hidden_rows, dtype=torch.int32)
        batch = replace(
            batch, hidden_rows=rows, taps=(Tap(0), Tap(2), Tap(2, normed=True)) if hidden_rows else ()
        )
        expected = self.plain.forward(batch)
        with no_waiting(self.device):
            output = self.padded.forward(batch)
        assert output.logits.isfinite().all()
        torch.testing.assert_close(output.logits.cpu(), expected.logits, atol=1e-4, rtol=0)
        assert set(output.hidden) == set(expected.hidden)
        for tap, states in expected.hidden.items():
            torch.testing.assert_close(output.hidden[tap].cpu(), states, atol=1e-4, rtol=0)

    def open(self, tokens: Sequence[int]) -> Request:
        return make_request(self.cache, tokens)

    def share(self, request: Request, run: int, draft: Draft, run_logits: int = 1) -> SequenceRows:
        self.cache.reserve(request.kv, run + len(draft))
        return SequenceRows(request.kv, request.tokens, run, draft, run_logits=run_logits)


@pytest.fixture(params=DEVICES)
def pair(request: pytest.FixtureRequest, model_path: Path) -> Pair:
    return Pair(model_path, request.param)


@pytest.mark.parametrize("seed", range(2))
def test_random_passes_equal_the_unpadded_ones_and_never_wait(pair: Pair, seed: int):
    rng = random.Random(seed)
    requests = [pair.open(random_tokens(rng, rng.randint(1, 70))) for _ in range(9)]
    for _ in range(12):
        shares, paths = [], []
        for request in rng.sample(requests, rng.randint(1, 9)):
            left = len(request.tokens) - request.kv.computed
            run = rng.randint(1, left)
            nodes = rng.choice([0, 1, 5, 24]) if run == left and len(request.tokens) < 90 else 0
            draft = random_tree(rng, nodes, len(request.tokens))
            shares.append(pair.share(request, run, draft, rng.choice([0, 1, 2])))
            path: list[int] = []
            for node, parent in enumerate(draft.parents):
                if parent == (path[-1] if path else -1) and rng.random() < 0.5:
                    path.append(node)
            paths.append((request, run, draft, path if run == left else []))
        rows = sum(share.run + len(share.draft) for share in shares)
        pair.run(shares, [rng.randrange(rows) for _ in range(rng.choice([0, 1, 3]))])
        for request, run, draft, path in paths:  # the trees' rows have to move in the next pass
            reached = request.kv.computed + run == len(request.tokens)
            pair.cache.commit(request.kv, run, path)
            if reached:
                request.tokens += [draft.tokens[node] for node in path] + random_tokens(rng, 1)
        pair.cache.check_integrity()


@pytest.mark.parametrize("requests", [1, 7, 8, 9])
@pytest.mark.parametrize("nodes", [0, 3, 7, 64])
def test_sizes_below_at_and_above_a_bucket(pair: Pair, requests: int, nodes: int):
    rng = random.Random(100 * requests + nodes)
    shares = []
    for _ in range(requests):
        tokens = random_tokens(rng, rng.choice([15, 16, 17]))
        shares.append(pair.share(pair.open(tokens), len(tokens), random_tree(rng, nodes, len(tokens))))
    pair.run(shares)


def test_no_logits_wanted(pair: Pair):
    pair.run([pair.share(pair.open(list(range(20))), 10, Draft(), run_logits=0)])


def test_what_padding_computes_harms_nobody(pair: Pair):
    for decoder in (pair.plain.decoder, pair.padded.decoder):
        assert isinstance(decoder, TorchDecoder)
        embedding = decoder.weights.embedding.clone()
        embedding[0] = torch.nan  # of the token that padding rows have
        decoder._stack.weights = replace(decoder.weights, embedding=embedding)
    pair.run([pair.share(pair.open(list(range(1, count))), count - 1, Draft()) for count in (40, 5, 9)])


def test_passes_that_nobody_waits_for_keep_their_own_batches(pair: Pair):
    """More passes under way than there are staging blocks: a block is not refilled before it was copied."""
    tokens = random_tokens(random.Random(8), 64)
    request = pair.open(tokens)
    outputs, expected = [], []
    for _ in tokens:
        batch = pair.buffers.lay_out(pair.cache, [pair.share(request, 1, Draft())], [])
        expected.append(pair.plain.forward(batch).logits)
        outputs.append(pair.padded.forward(batch).logits)
        pair.cache.commit(request.kv, 1, [])
    torch.testing.assert_close(torch.cat(outputs).cpu(), torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("entries", [0, 1, 50, 1 << 14])
def test_staging_that_is_too_small_grows(model_path: Path, entries: int):
    pair = Pair(model_path, "cpu")
    pair.padded.decoder._stack.staging = Staging(torch.device("cpu"), bucketed=True, entries=entries)
    rng = random.Random(entries)
    for count in (1, 30, 3, 100, 9):
        request = pair.open(random_tokens(rng, count))
        pair.run([pair.share(request, count, random_tree(rng, 5, count), run_logits=count)])
        pair.cache.close(request.kv)


def test_few_shapes_occur(model_path: Path):
    """Passes of 17 to 48 rows have two shapes on the device, each at an address that stays."""
    pair = Pair(model_path, "cpu")
    staging = Staging(torch.device("cpu"), bucketed=True)
    places = set()
    for rows in range(17, 49):
        request = pair.open(random_tokens(random.Random(rows), rows))
        batch = pair.buffers.lay_out(pair.cache, [pair.share(request, rows, Draft())], [])
        staged = staging.stage(batch, 16, spare_slot=PAGES * 16).batch
        places.add((tuple(staged.block_tables.shape), len(staged.token_ids), staged.slots.data_ptr()))
        pair.cache.close(request.kv)
    assert {place[:2] for place in places} == {((2, 8), 32), ((2, 8), 64)}  # a request and the empty one
    assert len(places) == 2
