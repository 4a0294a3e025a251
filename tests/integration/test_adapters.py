"""What an adapter adds is what merging it would, for its own requests alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from foreword.models.adapters import open_adapter
from helpers.adapters import ADAPTED, ALL, MergedCheckpoint, decoder_of, write_adapter
from helpers.cpu import INSTRUCTION_SETS, needs_cpu_kernels
from helpers.passes import adapted_logits, all_logits

CPU = [pytest.param(form, marks=needs_cpu_kernels) for form in ("float32", "int8", "q8_0")]


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(ADAPTED.vocab_size) for _ in range(count)]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("numbers", ["torch", *CPU])
@pytest.mark.parametrize(
    ("rank", "modules", "settings"),
    [
        (4, ALL, {}),
        (1, ("q_proj", "v_proj"), {}),
        (128, ("k_proj", "down_proj"), {"use_rslora": True, "lora_alpha": 8}),
        (17, ("o_proj", "up_proj"), {"alpha_pattern": {"o_proj": 17}}),
    ],
)
def test_logits_are_those_of_merged_weights(
    numbers: str, rank: int, modules: tuple[str, ...], settings: dict[str, Any], tmp_path: Path
):
    path = write_adapter(tmp_path / "adapter", rank, modules, **settings)
    merged = MergedCheckpoint(path)
    decoder = decoder_of(numbers)
    ids = tokens(40)
    plain = all_logits(decoder, ids)
    decoder.set_adapter(1, open_adapter(path, ADAPTED))
    (found,) = adapted_logits(decoder, [(1, ids)])
    expected = all_logits(decoder_of("torch", merged), ids)
    if numbers in ("torch", "float32"):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=0)
    else:
        rounding = relative(all_logits(decoder_of(numbers, merged), ids), expected)
        assert relative(found, expected) < 1.5 * rounding + 0.005
    assert relative(plain, expected) > 0.1, "the adapter changes nothing"
    assert torch.equal(all_logits(decoder, ids), plain)


@needs_cpu_kernels
@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
@pytest.mark.parametrize("form", ["int8", "float32"])
def test_a_row_has_the_same_bits_whatever_adapters_run_beside_it(
    form: str, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FOREWORD_ISA", isa)
    decoder = decoder_of(form)
    for slot, (rank, modules) in enumerate([(4, ALL), (16, ALL), (7, ("q_proj", "down_proj"))], start=1):
        path = write_adapter(tmp_path / str(slot), rank, modules, seed=slot)
        decoder.set_adapter(slot, open_adapter(path, ADAPTED))
    parts = [
        (slot, tokens(count, seed=count)) for slot, count in [(1, 1), (0, 5), (3, 21), (2, 3), (1, 2), (2, 1)]
    ]
    together = adapted_logits(decoder, parts)
    for part, found in zip(parts, together, strict=True):
        assert torch.equal(adapted_logits(decoder, [part])[0], found)
    alone = decoder_of(form, threads=1)
    alone.set_adapter(9, open_adapter(tmp_path / "2", ADAPTED))
    assert torch.equal(adapted_logits(alone, [(9, parts[3][1])])[0], together[3])


@needs_cpu_kernels
def test_the_kernels_refuse_a_slot_that_is_empty_and_factors_that_do_not_fit(tmp_path: Path):
    decoder = decoder_of("int8")
    with pytest.raises(ValueError, match="has no adapter"):
        adapted_logits(decoder, [(3, tokens(2))])
    decoder.set_adapter(3, open_adapter(write_adapter(tmp_path / "a"), ADAPTED))
    adapted_logits(decoder, [(3, tokens(2))])
    decoder.set_adapter(3, None)
    with pytest.raises(ValueError, match="has no adapter"):
        adapted_logits(decoder, [(3, tokens(2))])
    with pytest.raises(ValueError, match="another number of layers"):
        decoder._native.set_adapter(1, [])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="begin with 1"):
        decoder.set_adapter(0, None)
