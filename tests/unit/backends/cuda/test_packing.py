"""Checkpoints in 8 bits reach the kernels as they are stored; others are rounded when it is wanted."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from foreword.backends.choice import BackendChoice
from foreword.errors import CheckpointError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.formats.hf.config import hf_config
from foreword.models.layer_shapes import expected_shapes
from helpers.cuda import KERNEL_DEVICE, needs_triton
from helpers.packed_models import SCHEMES, write_packed

pytestmark = needs_triton

CPU = torch.device("cpu")
SETTINGS: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 256,
    "intermediate_size": 200,  # gate and up cannot be joined in blocks: the first does not end with one
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "rows": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "matrix": {"quant_method": "fp8"},
    "blocks": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
PROJECTIONS = ("qkv", "output", "gate_up", "down")


def scales_of(kind: str, rows: int, columns: int) -> Tensor:
    shape = {"rows": (rows, 1), "matrix": (), "blocks": (-(-rows // 128), -(-columns // 128))}[kind]
    return torch.rand(shape) + 0.5


def write_fp8(path: Path, kind: str, **changed: Any) -> Path:
    """A model with every projection in 8 bits, or fused as Phi-3 has them."""
    settings = SETTINGS | changed
    names = frozenset({"model.layers.0.input_layernorm.weight"})
    stored: dict[str, Tensor] = {}
    for name, shape in expected_shapes(hf_config(SETTINGS, names, path)).items():
        if not name.endswith("_proj.weight"):
            stored[name] = torch.randn(shape)
    stem, hidden, middle = "model.layers.0.", settings["hidden_size"], settings["intermediate_size"]
    matrices = {
        "self_attn.q_proj": (256, hidden),
        "self_attn.k_proj": (128, hidden),
        "self_attn.v_proj": (128, hidden),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
    }
    if changed:
        matrices = {"self_attn.qkv_proj": (512, hidden), "mlp.gate_up_proj": (2 * middle, hidden)}
    for name, shape in (
        matrices | {"self_attn.o_proj": (hidden, 256), "mlp.down_proj": (hidden, middle)}
    ).items():
        stored[f"{stem}{name}.weight"] = torch.randn(shape).to(torch.float8_e4m3fn)
        last = "weight_scale_inv" if kind == "blocks" else "weight_scale"
        stored[f"{stem}{name}.{last}"] = scales_of(kind, *shape)
    save_file(stored, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(settings | {"quantization_config": KINDS[kind]}))
    return path


def packed(path: Path, quantization: str) -> dict[str, Any]:
    from foreword.backends.cuda.packing import load_packed

    choice = BackendChoice("cuda", None, torch.float32, "", quantization)
    layer = load_packed(open_checkpoint(path), choice, CPU).layers[0]
    return {name: getattr(layer, name) for name in PROJECTIONS}


def numbers(weight: Any) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    scales = weight.scales
    if weight.in_blocks:
        scales = scales.repeat_interleave(128, 0)[: len(weight)].repeat_interleave(128, 1)[
            :, : weight.shape[1]
        ]
    return weight.values.float() * scales


@pytest.mark.parametrize("scheme", SCHEMES)
def test_published_layouts_stay_packed(tmp_path: Path, scheme: str):
    """Against what the checkpoint unpacks; a product with the identity shows the numbers of a matrix."""
    from foreword.backends.cuda.kernels.fp8 import Fp8Weight
    from foreword.backends.cuda.kernels.grouped import GroupedWeight
    from foreword.backends.cuda.products import Products

    torch.manual_seed(len(scheme))
    write_packed(tmp_path, scheme)
    kept, plain = packed(tmp_path, "int4"), packed(tmp_path, "none")
    for name in PROJECTIONS:
        weight = kept[name]
        if isinstance(weight, GroupedWeight):
            inputs = torch.eye(weight.shape[1], device=KERNEL_DEVICE)
            found = Products()(inputs, on_device(weight), None).T.cpu()
        else:
            found = numbers(weight)
        is_close = torch.allclose(found, plain[name], rtol=1e-3, atol=1e-5)
        # Matrices that cannot stay as they are, or be joined since each has an order of its own, are rounded again.
        is_odd = scheme in ("compressed int8", "block fp8") or (
            scheme == "gptq" and name in ("qkv", "gate_up")
        )
        assert is_close != is_odd
    assert isinstance(kept["qkv"], Fp8Weight if scheme == "compressed fp8" else GroupedWeight)


def on_device(weight: Any) -> Any:
    parts = {name: part.to(KERNEL_DEVICE) for name, part in vars(weight).items() if isinstance(part, Tensor)}
    return replace(weight, **parts)


FUSED = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "intermediate_size": 256,
    "original_max_position_embeddings": 64,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("changed", [{}, FUSED], ids=["separate", "fused"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_in_8_bits_stays_as_it_is(tmp_path: Path, kind: str, changed: dict[str, Any]):
    torch.manual_seed(len(kind))
    path = write_fp8(tmp_path, kind, **changed)
    kept, plain = packed(path, "fp8"), packed(path, "none")
    for name in PROJECTIONS:
        assert torch.equal(numbers(kept[name]), plain[name]) or (kind, name) == ("blocks", "gate_up")
    assert kept["qkv"].in_blocks == (kind == "blocks")
    assert kept["qkv"].nbytes < 1.02 * kept["qkv"].values.numel() + 4 * len(kept["qkv"])


def test_auto_keeps_8_bits_and_rounds_nothing(tmp_path: Path):
    kept, plain = (packed(write_fp8(tmp_path, "blocks"), "auto"), packed(tmp_path, "none"))
    assert torch.equal(numbers(kept["down"]), plain["down"]) and not isinstance(kept["down"], Tensor)
    assert torch.equal(kept["gate_up"], plain["gate_up"]), "blocks that no matrix ends with are unpacked"


def test_auto_unpacks_4_bits(tmp_path: Path):
    write_packed(tmp_path, "awq")
    found, plain = packed(tmp_path, "auto"), packed(tmp_path, "none")
    assert all(
        isinstance(found[name], Tensor) and torch.equal(found[name], plain[name]) for name in PROJECTIONS
    )


def test_blocks_that_no_matrix_ends_with_are_rounded_again(tmp_path: Path):
    path = write_fp8(tmp_path, "blocks")
    kept, plain = (packed(path, how)["gate_up"] for how in ("fp8", "none"))
    assert not kept.in_blocks
    assert 0 < (numbers(kept) - plain).abs().max() <= 2**-4 * plain.abs().max()


def test_a_matrix_with_a_nan_is_refused(tmp_path: Path):
    from safetensors.torch import load_file

    path = write_fp8(tmp_path, "rows")
    stored = load_file(path / "model.safetensors")
    stored["model.layers.0.mlp.up_proj.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(stored, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.weight holds NaN"):
        packed(path, "fp8")


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q5_0"])
def test_blocks_of_gguf_files_stay_as_they_are(kind: str):
    import gguf

    from foreword.backends.cuda.packing import _pack_stored
    from foreword.backends.cuda.products import Products
    from foreword.models.formats.checkpoint import QuantizedTensor

    stored = gguf.quantize(torch.randn(64, 96).numpy(), gguf.GGMLQuantizationType[kind])
    weight: Any = _pack_stored(QuantizedTensor(kind, stored, (64, 96)), KERNEL_DEVICE)
    if kind == "Q5_0":
        assert weight is None
        return
    expected = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]))
    found = Products()(torch.eye(96, device=KERNEL_DEVICE), weight, None).T.cpu()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "size", "floats"), [("Q4_K", 144, (0, 2)), ("Q6_K", 210, (208,))])
def test_blocks_of_256_entries_keep_the_scales_of_their_groups(kind: str, size: int, floats: tuple[int, ...]):
    """Within the rounding of a group's scale to 16 bits: less than that of the unpacked weights to bf16."""
    import gguf

    from foreword.backends.cuda.packing import _pack_stored
    from foreword.backends.cuda.products import Products
    from foreword.models.formats.checkpoint import QuantizedTensor

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (64, 2, size), dtype=torch.uint8)
    for place in floats:
        blocks[..., place : place + 2] = (torch.rand(64, 2, 1) / 64 + 1e-3).half().view(torch.uint8)
    stored = blocks.flatten(1).numpy()
    weight: Any = _pack_stored(QuantizedTensor(kind, stored, (64, 512)), KERNEL_DEVICE)
    assert weight.shape == (64, 512) and weight.nbytes == 64 * 64 * {"Q4_K": 5, "Q6_K": 9}[kind]
    expected = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType[kind]))
    found = Products()(torch.eye(512, device=KERNEL_DEVICE), weight, None).T.cpu()
    largest = expected.view(64, -1, 16).abs().amax(-1, keepdim=True).expand(-1, -1, 16).reshape(64, 512)
    assert ((found - expected).abs() <= largest * 2.0**-9).all()


def test_matrices_of_heads_are_packed_as_stored_or_rounded(tmp_path: Path):
    from foreword.backends.cuda.kernels.fp8 import Fp8Weight
    from foreword.backends.cuda.kernels.grouped import GroupedWeight
    from foreword.backends.cuda.packing import load_matrix
    from foreword.backends.cuda.products import Products
    from foreword.backends.torch.heads import TargetMatrices
    from foreword.models.heads.opening import open_head
    from foreword.models.heads.writing import quantize_head
    from helpers.tiny_heads import TinyHead

    TinyHead(360).eagle3().save(tmp_path / "plain")
    quantize_head(open_head(tmp_path / "plain"), tmp_path / "stored")
    plain, stored = (open_head(tmp_path / name) for name in ("plain", "stored"))
    ends = TargetMatrices(lambda ids: ids, lambda rows: rows, KERNEL_DEVICE, torch.float32)
    name = "layers.0.mlp.gate_proj.weight"
    kept = load_matrix(stored, name, ends, "auto")
    assert isinstance(kept, GroupedWeight) and kept.group == 64
    inputs = torch.eye(kept.shape[1], device=KERNEL_DEVICE)
    for rows in (slice(0, len(kept)), slice(3, 21)):
        found = Products()(inputs, kept[rows], None).T.cpu()
        torch.testing.assert_close(found, stored.load(name)[rows], rtol=1e-5, atol=1e-6)
    assert isinstance(load_matrix(stored, name, ends, "fp8"), GroupedWeight)
    assert isinstance(load_matrix(plain, name, ends, "fp8"), Fp8Weight)
    for head, other, quantization in (
        (stored, name, "none"),
        (plain, name, "auto"),
        (plain, "norm.weight", "fp8"),
        (stored, "norm.weight", "auto"),
    ):
        assert isinstance(load_matrix(head, other, ends, quantization), Tensor)


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_a_matrix_is_released_before_the_next_one_is_read(quantization: str):
    """So a model that fits packed can be loaded: beside it there is one matrix, not a second copy."""
    import weakref

    from foreword.backends.cuda.packing import RoundedMatrices
    from foreword.backends.torch.weights import weights_from
    from foreword.bench.random_models import RandomTensors
    from foreword.models.config import ModelConfig
    from helpers.random_checkpoint import SMOLLM2_SHAPE

    config: ModelConfig = replace(SMOLLM2_SHAPE, layers=SMOLLM2_SHAPE.layers[:2], vocab_size=64)
    alive: list[weakref.ref[Tensor]] = []

    class Watched(RandomTensors):
        def tensor(self, name: str) -> Tensor:
            assert not [read for read in alive if read() is not None]
            found = super().tensor(name)
            if name.endswith("_proj.weight"):
                alive.append(weakref.ref(found))
            return found

    weights = weights_from(RoundedMatrices(Watched(config, torch.bfloat16, CPU), quantization), config)
    assert len(alive) == 14
    matrices = sum(layer.nbytes for layer in weights.layers)
    numbers = sum(576 * 2 * (576 + 192) + 3 * 576 * 1536 for _ in config.layers)
    assert matrices < numbers * (1.02 if quantization == "fp8" else 0.54)
