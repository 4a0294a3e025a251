"""The CUDA backend computes what the torch decoder does, whatever shape a pass has."""

import random
from pathlib import Path

import pytest
import torch

from foreword.backends.batch import Tap
from foreword.backends.interface import Decoder
from foreword.backends.torch import layers
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from helpers.cuda import KERNEL_DEVICE, cuda_decoder, has_gpu, needs_triton
from helpers.passes import all_logits, compute, fragmented_cache, make_request, torch_decoder, with_all_logits
from helpers.tiny_models import make_hf_model
from helpers.trees import random_tokens, random_tree

pytestmark = needs_triton

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
    "biased": ("qwen2", {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3}),
}
ROWS, PROMPTS = (70, (42, 21, 33)) if has_gpu else (18, (24, 11, 18))  # of more than one page


@pytest.fixture(
    scope="module", params=SHAPES if has_gpu else ["even"]
)  # interpreted, a pass takes half a minute
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    architecture, overrides = SHAPES[request.param]
    return make_hf_model(tmp_path_factory.mktemp("model"), architecture, tied=True, **overrides)


def mixed_pass(decoder: Decoder, seed: int) -> tuple[torch.Tensor, dict[Tap, torch.Tensor]]:
    """A prompt chunk, a plain token and a tree in one pass, again and again over the same memory."""
    rng = random.Random(seed)
    last = decoder.config.num_layers
    taps = (Tap(0), Tap(1), Tap(last), Tap(last, normed=True))
    runner, cache = fragmented_cache(decoder, 40, seed)
    prompts = [random_tokens(rng, length) for length in PROMPTS]
    requests = [make_request(cache, prompt) for prompt in prompts]
    runs = (PROMPTS[0] - 2, 1, 1)
    for request, run in zip(requests, runs, strict=True):
        compute(runner, cache, request, len(request.tokens) - run)
    drafts = [Draft(), Draft(), random_tree(rng, 9, len(prompts[2]))]
    for _ in range(3 if has_gpu else 1):  # the second time it is captured, the third replayed
        entries = [PassEntry.of(request, run) for request, run in zip(requests, runs, strict=True)]
        with Transaction(cache, entries) as transaction:
            batch = with_all_logits(transaction.batch(drafts, None, taps, [False, True, True]))
            output = runner.forward(batch)
    return output.logits.cpu(), {tap: rows.cpu() for tap, rows in output.hidden.items()}


def test_a_text_in_one_pass(path: Path):
    ids = random_tokens(random.Random(1), ROWS)
    found, expected = all_logits(cuda_decoder(path), ids), all_logits(torch_decoder(path), ids)
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("seed", range(4 if has_gpu else 1))
def test_mixed_passes_and_their_hidden_states(path: Path, seed: int):
    found, hidden = mixed_pass(cuda_decoder(path), seed)
    expected, expected_hidden = mixed_pass(torch_decoder(path), seed)
    assert (found - expected).abs().max() < 1e-4
    assert hidden.keys() == expected_hidden.keys() != set()
    for tap, states in expected_hidden.items():
        assert (hidden[tap] - states).abs().max() < 1e-4


def test_8_bit_weights_are_what_rounded_inputs_and_weights_give(path: Path, monkeypatch: pytest.MonkeyPatch):
    """Against the reference with both rounded by torch; a number that is just between two may go either way."""

    def rounded(numbers: torch.Tensor) -> torch.Tensor:
        scale = numbers.abs().amax(1, keepdim=True).float().clamp(min=1e-30) / 448
        return (numbers.float() / scale).to(torch.float8_e4m3fn).float() * scale

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(rounded(x), rounded(weight), bias)

    ids = random_tokens(random.Random(1), ROWS)
    exact, found = all_logits(torch_decoder(path), ids), all_logits(cuda_decoder(path, "fp8-float32"), ids)
    monkeypatch.setattr(layers, "linear", linear)
    expected = all_logits(torch_decoder(path), ids)
    assert (found - expected).abs().mean() < 0.5 * (exact - expected).abs().mean()


def test_keys_and_values_in_8_bits_change_little(path: Path):
    ids = random_tokens(random.Random(1), ROWS)
    plain, packed = (cuda_decoder(path, dtype) for dtype in ("bfloat16" if has_gpu else "float32", "fp8-kv"))
    assert packed.kv_rows().bytes_per_row < 0.9 * plain.kv_rows().bytes_per_row
    found, expected = all_logits(packed, ids), all_logits(plain, ids)
    assert 0 < (found - expected).abs().mean() < 0.2 * expected.abs().mean()
    assert packed.with_layers([0]).kv_rows().packed


def test_a_store_of_another_decoder_is_refused(path: Path):
    decoder = cuda_decoder(path)
    runner, cache = fragmented_cache(decoder.with_layers([0]), 4, 0)
    with Transaction(cache, [PassEntry.of(make_request(cache, [1, 2]), 2)]) as transaction:
        batch = transaction.batch([Draft()])
        with pytest.raises(ValueError, match="another decoder"):
            decoder.forward(batch, runner.store)
    assert decoder.device.type == KERNEL_DEVICE.type
