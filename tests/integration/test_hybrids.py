"""Models with recurrent layers: equal to transformers, however their rows are computed, shared or rolled back."""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.backends.runner import ModelRunner
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.recurrent_rows import RecurrentStore
from foreword.engine.requests.request import Request
from foreword.kv.chunks import CHUNK, StateSizes
from foreword.kv.paged_cache import PagedCache
from foreword.models.adapters import RECURRENT_MODULES, open_adapter
from foreword.speculation.draft import Draft
from foreword.speculation.requests import NOTHING_DRAWN, PassEntry, Verdict
from foreword.speculation.transaction import Transaction
from helpers.adapters import ALL, adapter_tensors, write_adapter
from helpers.passes import adapted_logits, all_logits, compute, make_request, torch_decoder, with_all_logits
from helpers.tiny_families import HYBRIDS, make_family
from helpers.trees import random_tokens, random_tree, root_path

CLOSE = 1e-4
"""Relative to the largest logit: different sums of the same numbers in float32."""


@dataclass(frozen=True)
class Hybrid:
    """A decoder here, and in transformers."""

    decoder: TorchDecoder
    theirs: torch.nn.Module

    @torch.inference_mode()
    def scanned(self, ids: list[int]) -> torch.Tensor:
        return self.theirs(torch.tensor([ids])).logits[0]

    @torch.inference_mode()
    def stepped(self, ids: list[int], first: int) -> torch.Tensor:
        """From the token `first` on token by token, by the recurrence."""
        past = self.theirs(torch.tensor([ids[:first]]), use_cache=True).past_key_values
        found = []
        for place in range(first, len(ids)):
            token, at = torch.tensor([[ids[place]]]), torch.tensor([[place]])
            output = self.theirs(token, position_ids=at, past_key_values=past, use_cache=True)
            past = output.past_key_values
            found.append(output.logits[0, 0])
        return torch.stack(found)

    def fresh(
        self, sequences: int = 3, pages: int = 64, checkpoints: int = 4
    ) -> tuple[ModelRunner, PagedCache]:
        states = StateSizes(sequences, checkpoints)
        cache = PagedCache(pages, prefix_caching=True, states=states)
        return ModelRunner.allocate(self.decoder, pages, cache.page_size, states=states), cache


@pytest.fixture(scope="module", params=list(HYBRIDS))
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Hybrid:
    path, theirs = make_family(tmp_path_factory.mktemp(request.param), request.param)
    return Hybrid(torch_decoder(path), theirs)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 0.0) -> None:
    allowed = max(tolerance, CLOSE * float(theirs.abs().max()))
    assert float((ours - theirs).abs().max()) <= allowed


def run(runner: ModelRunner, cache: PagedCache, request: Request, rows: int) -> torch.Tensor:
    """Compute the next committed tokens and give all their logits."""
    with Transaction(cache, [PassEntry.of(request, rows)]) as transaction:
        logits = runner.forward(with_all_logits(transaction.batch([Draft()]))).logits
        transaction.commit([NOTHING_DRAWN])
    return logits


def test_prompts_and_decoded_tokens_equal_transformers_to_what_its_own_two_forms_differ_by(hybrid: Hybrid):
    ids = random_tokens(random.Random(1), 2 * CHUNK + 9)
    first = 2 * CHUNK - 14
    scanned, stepped = hybrid.scanned(ids), hybrid.stepped(ids, first)
    differ = float((scanned[first:] - stepped).abs().max())
    runner, cache = hybrid.fresh()
    request = make_request(cache, ids)
    sizes = (CHUNK - 9, *[1] * 18, CHUNK - 14, *[1] * 14)  # token by token at the ends of chunks
    decoded = [run(runner, cache, request, rows) for rows in sizes]
    for ours in (all_logits(hybrid.decoder, ids), torch.cat(decoded)):
        assert_close(ours, scanned, differ)
        assert_close(ours[first:], stepped, differ)


@pytest.mark.parametrize("seed", range(3))
def test_passes_of_any_size(hybrid: Hybrid, seed: int):
    rng = random.Random(seed)
    ids = random_tokens(rng, rng.choice([CHUNK, CHUNK + 1, 150, 3 * CHUNK]))
    expected = all_logits(hybrid.decoder, ids)
    runner, cache = hybrid.fresh()
    request = make_request(cache, ids)
    parts = []
    while (done := request.kv.computed) < len(ids):
        parts.append(run(runner, cache, request, min(rng.choice([1, 2, 7, 31, 63, 64, 65]), len(ids) - done)))
        cache.check_integrity()
    assert_close(torch.cat(parts), expected)


@pytest.mark.parametrize("length", [1, 3, CHUNK - 9, CHUNK - 1, CHUNK, 2 * CHUNK + 20])
def test_trees_what_is_committed_of_them_and_what_is_rolled_back(hybrid: Hybrid, length: int):
    rng = random.Random(length)
    prompt = random_tokens(rng, length)
    runner, cache = hybrid.fresh()
    request = make_request(cache, prompt)
    if length > 1:
        compute(runner, cache, request, length - 1)
    room = cache.max_draft_depth(length - 1)
    draft = random_tree(rng, 20, length).within(20, room)
    paths = [root_path(draft, node) for node in range(len(draft))]
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:  # rolled back
        first = runner.forward(with_all_logits(transaction.batch([draft]))).logits
    cache.check_integrity()
    longest: list[int] = max(paths, key=len, default=[])
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        again = runner.forward(with_all_logits(transaction.batch([draft]))).logits
        accepted = tuple(draft.tokens[node] for node in longest)
        transaction.commit([Verdict(tuple(longest), (*accepted, 11))])
    assert torch.equal(first, again)
    leaves = set(range(len(draft))) - set(draft.parents)
    for path in (paths[leaf] for leaf in leaves):
        alone = prompt + [draft.tokens[step] for step in path]
        assert_close(again[[1 + step for step in path]], all_logits(hybrid.decoder, alone)[length:])
    after = run(runner, cache, request, 1)
    assert_close(after[-1], all_logits(hybrid.decoder, request.tokens)[-1])
    cache.check_integrity()


def test_a_prefix_is_found_up_to_the_last_state_and_forks_share_it(hybrid: Hybrid):
    prompt = random_tokens(random.Random(5), 2 * CHUNK + 30)
    runner, cache = hybrid.fresh()
    first = make_request(cache, prompt)
    compute(runner, cache, first, 100)
    compute(runner, cache, first, len(prompt) - 100)
    second = replace_sequence(cache, make_request(cache, prompt), prompt)
    assert second.kv.computed == 2 * CHUNK
    expected = all_logits(hybrid.decoder, prompt)[-1]
    assert_close(run(runner, cache, second, 30)[-1], expected)
    assert cache.can_fork(first.kv, len(prompt) - 1)
    assert not cache.can_fork(first.kv, 2 * CHUNK - 1)
    third = make_request(PagedCache(1), prompt)
    third.kv = cache.fork(first.kv, len(prompt) - 1)
    assert_close(run(runner, cache, third, 1)[-1], expected)
    for request in (first, second, third):
        cache.close(request.kv)
    cache.check_integrity()


def replace_sequence(cache: PagedCache, request: Request, tokens: list[int]) -> Request:
    cache.close(request.kv)
    request.kv = cache.open(tokens=tokens)
    return request


def test_requests_side_by_side(hybrid: Hybrid):
    rng = random.Random(8)
    texts = [random_tokens(rng, length) for length in (70, 5, 130)]
    runner, cache = hybrid.fresh()
    requests = [make_request(cache, text) for text in texts]
    compute(runner, cache, requests[2], 120)
    entries = [PassEntry.of(request, len(request.tokens) - request.kv.computed) for request in requests]
    with Transaction(cache, entries) as transaction:
        transaction.reserve()
        logits = runner.forward(with_all_logits(transaction.batch([Draft()] * 3))).logits
    lasts = logits.split([entry.run for entry in entries])
    for text, own in zip(texts, lasts, strict=True):
        assert_close(own[-1], all_logits(hybrid.decoder, text)[-1])


def test_sizes_rounded_up_as_on_a_gpu(hybrid: Hybrid):
    ids = random_tokens(random.Random(9), 100)
    padded = TorchDecoder(hybrid.decoder.config, hybrid.decoder.weights, bucketed=True)
    assert_close(all_logits(padded, ids), all_logits(hybrid.decoder, ids))


def test_a_pass_without_states_is_refused(hybrid: Hybrid):
    ids = random_tokens(random.Random(9), 5)
    runner, cache = hybrid.fresh()
    with Transaction(cache, [PassEntry.of(make_request(cache, ids), 5)]) as transaction:
        batch = replace(transaction.batch([Draft()]), chunks=())
        with pytest.raises(ValueError, match="no states"):
            runner.forward(batch)


@pytest.mark.parametrize("nodes", [1, 8, 40])
def test_rolling_back_copies_no_state_and_no_row(hybrid: Hybrid, nodes: int, monkeypatch: pytest.MonkeyPatch):
    """Memory and traffic of states do not depend on depth or width."""
    runner, cache = hybrid.fresh()
    request = make_request(cache, random_tokens(random.Random(2), 20))
    compute(runner, cache, request, 19)
    assert cache.chunks is not None
    used, written = cache.chunks.states_used, []
    monkeypatch.setattr(RecurrentStore, "write_state", lambda *_: written.append(1))
    for seed in range(3):
        draft = random_tree(random.Random(seed), nodes, 20).within(nodes, 40)
        with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
            batch = transaction.batch([draft])
            runner.forward(batch)
            transaction.commit([Verdict((), (7,))])
        assert not batch.ring_copies
        assert cache.chunks.states_used == used
    assert not written
    assert not cache.pending_moves


def test_the_text_part_of_a_checkpoint_with_images(tmp_path: Path):
    path, _ = make_family(tmp_path, "qwen3_5")
    ids = random_tokens(random.Random(9), 20)
    expected = all_logits(torch_decoder(path), ids)
    settings = json.loads((path / "config.json").read_text(encoding="utf-8"))
    outer = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": settings,
        "vision_config": {},
    }
    (path / "config.json").write_text(json.dumps(outer), encoding="utf-8")
    tensors = load_file(path / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    save_file(renamed | {"model.visual.x": torch.ones(1)}, path / "model.safetensors", {"format": "pt"})
    assert torch.equal(all_logits(torch_decoder(path), ids), expected)


def test_adapters_on_the_projections_of_recurrent_layers(tmp_path: Path):
    path, _ = make_family(tmp_path / "model", "qwen3_5")
    decoder, ids = torch_decoder(path), random_tokens(random.Random(4), CHUNK + 9)
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
    assert_close(adapted_logits(decoder, [(1, ids)])[0], all_logits(torch_decoder(path), ids))
    assert {module for _, module in adapter.factors} > {"linear_attn.out_proj", "self_attn.q_proj"}
