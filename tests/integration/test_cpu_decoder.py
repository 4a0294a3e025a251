"""The native decoder equals the torch decoder on every architecture, and its forms stay near it."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch

from foreword.backends.batch import Tap
from foreword.errors import CheckpointError, RequestError
from foreword.speculation.draft import Draft
from foreword.speculation.requests import PassEntry
from foreword.speculation.transaction import Transaction
from helpers.cpu import INSTRUCTION_SETS, cpu_decoder, needs_cpu_kernels
from helpers.passes import all_logits, fragmented_cache, make_request, torch_decoder
from helpers.tiny_models import TINY_VOCAB, make_hf_model, write_gguf

pytestmark = needs_cpu_kernels

TAPS = (Tap(2), Tap(0), Tap(1), Tap(2, normed=True))

CASES = [
    ("llama", True, {}),
    ("llama", False, {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 24}),
    ("llama", False, {"attention_bias": True, "mlp_bias": True, "intermediate_size": 99}),
    ("llama", True, {"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 20}),
    (
        "llama3",
        False,
        {"hidden_size": 70, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 10},
    ),
    ("llama3", True, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    ("mistral", False, {}),
    ("qwen2", True, {}),
    ("qwen3", False, {"num_attention_heads": 3, "num_key_value_heads": 3}),
]


def tokens(count: int) -> list[int]:
    return torch.randint(0, TINY_VOCAB, (count,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize(("architecture", "tied", "overrides"), CASES)
def test_every_architecture_equals_torch(tmp_path: Path, architecture: str, tied: bool, overrides: dict):
    path = make_hf_model(tmp_path, architecture, tied=tied, **overrides)
    ids = tokens(150)
    expected = all_logits(torch_decoder(path), ids)
    torch.testing.assert_close(all_logits(cpu_decoder(path, "float32"), ids), expected, atol=1e-4, rtol=0)
    for form in ("int8", "q8_0"):
        rounded = all_logits(cpu_decoder(path, form), ids)
        error = float((rounded - expected).norm() / expected.norm())
        assert error < 0.06, (form, error)


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_every_instruction_set_runs_the_whole_pass(
    tiny_model: Path, isa: str, monkeypatch: pytest.MonkeyPatch
):
    ids = tokens(70)
    fastest = all_logits(cpu_decoder(tiny_model, "int8"), ids)
    monkeypatch.setenv("FOREWORD_ISA", isa)
    decoder = cpu_decoder(tiny_model, "int8")
    assert decoder.isa == isa
    torch.testing.assert_close(all_logits(decoder, ids), fastest, atol=0.05, rtol=0)


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_blocks_are_kept_as_the_file_has_them(tmp_path: Path, quant: str):
    path = make_hf_model(tmp_path / "hf", "qwen2", intermediate_size=96, tied=True)
    write_gguf(path, tmp_path / "model.gguf", quant)
    decoder, ids = cpu_decoder(tmp_path / "model.gguf", "stored"), tokens(60)
    expected = all_logits(torch_decoder(tmp_path / "model.gguf"), ids)
    ours = all_logits(decoder, ids)
    assert (ours - expected).norm() / expected.norm() < 0.03
    bits = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[quant]]
    assert decoder.weight_bytes < 1.5 * bits[1] / bits[0] * 64 * (TINY_VOCAB + 2 * (64 * 3 + 96 * 3)) + 80_000


def test_stored_without_blocks_is_refused(tiny_model: Path):
    with pytest.raises(CheckpointError, match="no blocks to keep"):
        cpu_decoder(tiny_model, "stored")


def test_hidden_states_of_chosen_layers_and_rows(tiny_model: Path):
    outputs = []
    for decoder in (cpu_decoder(tiny_model, "float32"), torch_decoder(tiny_model)):
        runner, cache = fragmented_cache(decoder, 4, seed=1)
        with Transaction(cache, [PassEntry.of(make_request(cache, tokens(20)), 20)]) as transaction:
            rows = torch.tensor([19, 3, 7, 3], dtype=torch.int32)
            batch = replace(transaction.batch([Draft()]), hidden_rows=rows, taps=TAPS)
            outputs.append(runner.forward(batch).hidden)
    ours, theirs = outputs
    assert list(ours) == list(TAPS)
    for tap in TAPS:
        torch.testing.assert_close(ours[tap], theirs[tap], atol=1e-4, rtol=0)


@pytest.mark.parametrize("tap", [Tap(3), Tap(-1), Tap(1, normed=True)])
def test_hidden_states_that_the_model_does_not_have(tiny_model: Path, tap: Tap):
    runner, cache = fragmented_cache(cpu_decoder(tiny_model, "int8"), 4, seed=1)
    with Transaction(cache, [PassEntry.of(make_request(cache, [1, 2, 3]), 3)]) as transaction:
        batch = replace(transaction.batch([Draft()]), taps=(tap,))
        with pytest.raises(ValueError, match=r"norm|layer"):
            runner.forward(batch)


def test_a_batch_that_points_outside_is_refused_not_followed(tiny_model: Path):
    decoder = cpu_decoder(tiny_model, "int8")
    runner, cache = fragmented_cache(decoder, 4, seed=1)
    with Transaction(cache, [PassEntry.of(make_request(cache, tokens(20)), 20)]) as transaction:
        batch = transaction.batch([Draft()])
    for name, value in (
        ("token_ids", TINY_VOCAB),
        ("slots", 64),
        ("block_tables", 4),
        ("prefix_lens", 33),
        ("slots", -1),
    ):
        broken = getattr(batch, name).clone()
        broken.view(-1)[0] = value
        with pytest.raises(ValueError):
            runner.forward(replace(batch, **{name: broken}))
    with pytest.raises(RequestError, match="16 rows"):
        decoder.new_kv_store(4, 32)


def test_logits_of_chosen_rows_only_and_of_none(tiny_model: Path):
    decoder = cpu_decoder(tiny_model, "int8")
    everything = all_logits(decoder, tokens(30))
    for wanted in ([29], [3, 3, 0, 29], []):
        runner, cache = fragmented_cache(decoder, 4, seed=1)
        with Transaction(cache, [PassEntry.of(make_request(cache, tokens(30)), 30)]) as transaction:
            batch = replace(transaction.batch([Draft()]), logit_rows=torch.tensor(wanted, dtype=torch.int32))
            assert torch.equal(runner.forward(batch).logits, everything[wanted])


@pytest.mark.model
def test_resident_memory_of_the_default_form(default_model: Path):
    """At most 250 MB above what importing torch takes, after loading and answering; a head comes on top."""
    import subprocess
    import sys

    program = (
        "import sys, torch\n"
        "def resident():\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return 1024 * int(next(l for l in lines if l.startswith('VmRSS:')).split()[1])\n"
        "before = resident()\n"
        "from foreword import LLM, SamplingParams\n"
        "llm = LLM(sys.argv[1], device='cpu', backend='cpu', speculation='off')\n"
        "llm.generate('Hi', SamplingParams(max_tokens=8))\n"
        "print(resident() - before)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, str(default_model)], capture_output=True, text=True, check=True
    )
    assert int(run.stdout) < 250e6
