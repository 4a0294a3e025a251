"""One pass over anything equals running it alone: trees, chunks, mixed batches, fragmented pages."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foreword.backends.batch import Tap
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry, Verdict
from foreword.speculation.transaction import Transaction
from helpers.passes import (
    DEVICES,
    all_logits,
    compute,
    fragmented_cache,
    make_request,
    with_all_logits,
)
from helpers.tiny_models import make_hf_model
from helpers.trees import random_tokens, random_tree, root_path

TAPS = (Tap(0), Tap(1), Tap(2), Tap(2, normed=True))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_hf_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True)


@pytest.fixture(params=[*DEVICES, "cpu, padded"])
def decoder(request: pytest.FixtureRequest, model_path: Path) -> TorchDecoder:
    checkpoint = open_checkpoint(model_path)
    device, *padded = request.param.split(", ")
    weights = load_weights(checkpoint, torch.float32, torch.device(device))
    return TorchDecoder(checkpoint.config, weights, bucketed=bool(padded) or None)


@pytest.mark.parametrize("nodes", [20, 33, 64])
def test_every_node_of_a_tree_equals_its_root_path_alone(decoder: TorchDecoder, nodes: int):
    rng = random.Random(nodes)
    prompt = random_tokens(rng, 37)
    runner, cache = fragmented_cache(decoder, 12, seed=nodes)
    request = make_request(cache, prompt)
    compute(runner, cache, request, len(prompt) - 1)
    draft = random_tree(rng, nodes, len(prompt))
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        tree_logits = runner.forward(transaction.batch([draft])).logits.cpu()
    for node in range(nodes):
        alone = [draft.tokens[n] for n in root_path(draft, node)]
        expected = all_logits(decoder, prompt + alone)[-1]
        torch.testing.assert_close(tree_logits[1 + node], expected, atol=1e-4, rtol=0)


def test_a_committed_path_continues_as_if_it_had_been_typed(decoder: TorchDecoder):
    rng = random.Random(5)
    prompt = random_tokens(rng, 30)
    runner, cache = fragmented_cache(decoder, 12, seed=5)
    request = make_request(cache, prompt)
    compute(runner, cache, request, len(prompt) - 1)
    draft = random_tree(rng, 24, len(prompt))
    path = root_path(draft, max(range(24), key=lambda node: len(root_path(draft, node))))
    assert path != list(range(len(path))), "the path must need moves"
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        runner.forward(transaction.batch([draft]))
        accepted = tuple(draft.tokens[node] for node in path)
        transaction.commit([Verdict(tuple(path), (*accepted, 11))])
    assert request.kv.computed == len(request.tokens) - 1
    with Transaction(cache, [PassEntry.of(request, 1)]) as transaction:
        continued = runner.forward(transaction.batch([Draft()])).logits.cpu()[0]
    torch.testing.assert_close(continued, all_logits(decoder, request.tokens)[-1], atol=1e-4, rtol=0)


def test_chunks_plain_tokens_chains_and_trees_share_one_pass(decoder: TorchDecoder):
    rng = random.Random(9)
    runner, cache = fragmented_cache(decoder, 40, seed=9)
    prompts = [random_tokens(rng, count) for count in (50, 21, 1, 33)]
    done = [16, 20, 0, 32]
    runs = [20, 1, 1, 1]
    drafts = [Draft(), Draft(), Draft.chain(random_tokens(rng, 6), 1), random_tree(rng, 20, 33)]
    requests = [make_request(cache, prompt) for prompt in prompts]
    for request, count in zip(requests, done, strict=True):
        if count:
            compute(runner, cache, request, count)
    shares = [PassEntry.of(request, run) for request, run in zip(requests, runs, strict=True)]
    with Transaction(cache, shares) as transaction:
        batch = with_all_logits(transaction.batch(drafts))
        logits = runner.forward(batch).logits.cpu()
    starts = batch.row_starts.tolist()
    for index, (prompt, draft) in enumerate(zip(prompts, drafts, strict=True)):
        rows = logits[starts[index] : starts[index + 1]]
        end = done[index] + runs[index]
        expected = [all_logits(decoder, prompt[:end])[done[index] :]]
        for node in range(len(draft)):
            alone = [draft.tokens[n] for n in root_path(draft, node)]
            expected.append(all_logits(decoder, prompt + alone)[-1:])
        torch.testing.assert_close(rows, torch.cat(expected), atol=1e-4, rtol=0)


def test_hidden_states_of_chosen_layers_and_rows(decoder: TorchDecoder, model_path: Path):
    from transformers import AutoModelForCausalLM

    prompt = random_tokens(random.Random(1), 20)
    runner, cache = fragmented_cache(decoder, 4, seed=1)
    with Transaction(cache, [PassEntry.of(make_request(cache, prompt), 20)]) as transaction:
        batch = transaction.batch([Draft()])
        rows = torch.tensor([19, 3, 7], dtype=torch.int32)
        output = runner.forward(replace(batch, hidden_rows=rows, taps=TAPS))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    assert set(output.hidden) == set(TAPS)
    for tap, expected in ((Tap(0), states[0]), (Tap(1), states[1]), (Tap(2, normed=True), states[2])):
        torch.testing.assert_close(output.hidden[tap].cpu(), expected[0][rows.long()], atol=1e-4, rtol=0)
    normed = model.model.norm(output.hidden[Tap(2)].cpu())  # transformers has no other form of the last one
    torch.testing.assert_close(normed, states[2][0][rows.long()], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tap", [Tap(3), Tap(-1), Tap(1, normed=True)])
def test_hidden_states_that_the_model_does_not_have(decoder: TorchDecoder, tap: Tap):
    runner, cache = fragmented_cache(decoder, 4, seed=1)
    with Transaction(cache, [PassEntry.of(make_request(cache, [1, 2, 3]), 3)]) as transaction:
        batch = replace(transaction.batch([Draft()]), taps=(tap,))
        with pytest.raises(ValueError, match=r"norm|layer"):
            runner.forward(batch)
