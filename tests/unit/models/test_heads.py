"""Files of draft heads: what they are found to be, and what is refused in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.backends.cpu.grouped import readable_blocks
from foreword.errors import CheckpointError, ForewordError, RequestError
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, ModelConfig, NormSpec, RopeSpec
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.heads import opening
from foreword.models.heads.describe import describe_head
from foreword.models.heads.files import expanded
from foreword.models.heads.names import canonical_name, head_kind
from foreword.models.heads.opening import open_head
from foreword.models.heads.writing import GROUP, convert_head, quantize_head, rounded_levels
from helpers.tiny_heads import HIDDEN, TinyHead
from helpers.tiny_models import make_hf_model, write_gguf

IDS = "eagle_aux_hidden_state_layer_ids"
VOCAB = 90
QUERY, OUTPUT = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"
TARGET = ModelConfig(
    "llama",
    VOCAB,
    HIDDEN,
    512,
    (LayerSpec(AttentionSpec(4, 2, 16), MlpSpec(96)),) * 8,
    NormSpec(1e-5),
    RopeSpec(10000.0),
    True,
)


def eagle3(**options: Any) -> TinyHead:
    return TinyHead(VOCAB, draft_vocab=40, **options).eagle3()


def saved(path: Path, head: TinyHead | None = None, **config: Any) -> Path:
    return (head or eagle3()).save(path, **{"draft_vocab_size": 40, **config})


@pytest.mark.parametrize(
    ("config", "boundaries"),
    [
        ({}, (2, 4, 5)),  # low, half, high of eight layers
        ({IDS: [1, 2, 8]}, (1, 2, 8)),  # vLLM, speculators: boundaries
        ({"eagle_config": {IDS: [1, 2, 7]}}, (2, 3, 8)),  # SGLang, SpecForge: layers, whose outputs are meant
        ({"target_layer_ids": [0, 3, 6]}, (1, 4, 7)),  # DeepSpec: the same
        ({IDS: [2, 3, 8], "eagle_config": {IDS: [1, 2, 7]}}, (2, 3, 8)),  # both, and they agree
    ],
)
def test_layers_are_counted_as_their_authors_count_them(
    tmp_path: Path, config: dict[str, Any], boundaries: tuple[int, ...]
):
    assert open_head(saved(tmp_path / "head", **config)).fitted(TARGET).spec.boundaries == boundaries


def test_d2t_holds_offsets(tmp_path: Path):
    head = eagle3()
    found = open_head(saved(tmp_path / "head", head)).token_ids
    kept = torch.nonzero(head.tensors["t2d"]).flatten()
    assert found is not None
    assert found.tolist() == kept.tolist()


def test_offsets_of_zero_are_the_same_vocabulary(tmp_path: Path):
    head = TinyHead(VOCAB).eagle3()
    head.tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
    assert open_head(head.save(tmp_path / "head")).token_ids is None


def changed(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], Path]:
    def write(path: Path) -> Path:
        head = eagle3()
        change(head.tensors)
        return saved(path, head)

    return write


def configured(**config: Any) -> Callable[[Path], Path]:
    return lambda path: saved(path, **config)


def twice(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][1] = tensors["d2t"][0] - 1


def far(tensors: dict[str, torch.Tensor]) -> None:
    tensors["d2t"][-1] = VOCAB


def other_mask(tensors: dict[str, torch.Tensor]) -> None:
    tensors["t2d"] = tensors["t2d"].flip(0)


def broken(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.full_like(tensors["fc.weight"], torch.nan)


REFUSED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a missing tensor": (
        changed(lambda t: t.pop("layers.0.mlp.up_proj.weight")),
        "lacks tensor layers.0.mlp.up_proj",
    ),
    "no table for a reduced vocabulary": (changed(lambda t: t.pop("d2t")), "lacks tensor d2t"),
    "an unknown tensor": (changed(lambda t: t.update(extra=torch.ones(2))), "unknown tensor extra"),
    "a misshapen tensor": (
        changed(lambda t: t.update({"norm.weight": torch.ones(5)})),
        r"norm.weight has shape \(5,\), its config says \(64,\)",
    ),
    "a token twice": (changed(twice), "the same id twice"),
    "a token behind the vocabulary": (changed(far), "outside the vocabulary of 90"),
    "tables that differ": (changed(other_mask), "d2t and t2d name different tokens"),
    "no numbers": (changed(broken), "fc.weight holds NaN"),
    "layers counted in two ways": (
        configured(**{IDS: [1, 2, 3], "eagle_config": {IDS: [1, 2, 3]}}),
        "counted in different ways",
    ),
    "another number of layers": (configured(**{IDS: [1, 2]}), "of 64 numbers and the config names 2"),
    "layers that are no numbers": (configured(**{IDS: "all"}), "is 'all', not a list of layers"),
    "a layer that the target lacks": (configured(**{IDS: [1, 2, 9]}), "after layer 9 and it has 8"),
    "a wrong hidden size": (
        configured(target_hidden_size=32, **{IDS: [1] * 6}),
        "hidden size of 32 and this model's is 64",
    ),
    "a wrong vocabulary": (
        lambda path: TinyHead(80, draft_vocab=40).eagle3().save(path, draft_vocab_size=40),
        "vocabulary of 80 and this model's is 90",
    ),
    "too many taps without names": (
        lambda path: TinyHead(VOCAB, draft_vocab=40, taps=4).eagle3().save(path, draft_vocab_size=40),
        "does not say which",
    ),
    "two norms of the features": (
        lambda path: saved(path, eagle3(norms="each"), norm_before_fc=True),
        "exclude each other|lacks tensor input_norm",
    ),
    "another activation": (configured(hidden_act="gelu"), "activation 'gelu'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path, name: str):
    write, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message) as caught:
        head = open_head(write(tmp_path / "head")).fitted(TARGET)
        for tensor in head.spec.shapes:
            if tensor not in ("d2t", "t2d"):
                head.load(tensor)
    assert "\n" not in str(caught.value)


def test_what_a_narrow_head_cannot_borrow_is_named(tmp_path: Path):
    head = TinyHead(VOCAB, draft_vocab=40, target_hidden=32, own_ends=False).eagle3()
    path = saved(tmp_path / "head", head, target_hidden_size=32, **{IDS: [1, 2, 3]})
    with pytest.raises(
        CheckpointError, match=r"lacks tensor embed_tokens\.weight and cannot use the target's"
    ):
        open_head(path).fitted(replace(TARGET, hidden_size=32))


def test_pickles_are_refused_with_the_line_that_helps_and_converted(tmp_path: Path):
    head, path = eagle3(), tmp_path / "pickled"
    saved(path, head, **{IDS: [1, 2, 3]})
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    torch.save(tensors, path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="foreword head convert"):
        open_head(path)
    convert_head(path, tmp_path / "converted")
    found = open_head(tmp_path / "converted")
    assert found.spec.boundaries == (1, 2, 3)
    assert found.files.config["speculators_model_type"] == "eagle3"
    for name, tensor in head.tensors.items():
        assert torch.equal(found.files.stored(name), tensor)


def test_a_pickle_with_more_than_tensors_is_not_run(tmp_path: Path):
    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    saved(tmp_path / "head")
    (tmp_path / "head" / "model.safetensors").unlink()
    torch.save({"fc.weight": Evil()}, tmp_path / "head" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="more than tensors"):
        convert_head(tmp_path / "head", tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("options", [{}, {"norms": "each"}, {"norms": "whole", "bias": True}, {"layers": 2}])
def test_a_converted_head_is_the_same_head(tmp_path: Path, options: dict[str, Any]):
    flags = {"norm_output": True, "eagle_config": {IDS: [1, 2, 3]}}
    path = eagle3(**options).save(
        tmp_path / "head", {"layers.0.": "midlayer."}, draft_vocab_size=40, acceptance_by_level=[0.7], **flags
    )
    convert_head(path, tmp_path / "converted")
    before, after = open_head(path), open_head(tmp_path / "converted")
    assert after.spec == before.spec
    assert after.acceptance_by_level == (0.7,)
    with pytest.raises(RequestError, match="exists"):
        convert_head(path, tmp_path / "converted")


@pytest.mark.parametrize(("bits", "levels", "share"), [(8, 127, 0.4), (4, 7, 0.27)])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_rounded_heads_are_close_and_small(tmp_path: Path, kind: str, bits: int, levels: int, share: float):
    head = TinyHead(VOCAB, fc_bias=True, inner=128).eagle() if kind == "eagle" else eagle3(inner=128)
    path = head.save(
        tmp_path / "head", draft_vocab_size=40 if kind == "eagle3" else None, acceptance_by_level=[0.7, 0.6]
    )
    quantize_head(open_head(path), tmp_path / "small", bits)
    small = open_head(tmp_path / "small")
    assert small.acceptance_by_level == (0.7, 0.6)
    assert small.spec.shapes == open_head(path).spec.shapes
    for name, tensor in head.tensors.items():
        if tensor.ndim == 2:
            error = (small.load(name) - tensor).abs().amax()
            assert 0 < error <= tensor.abs().amax() / levels / 2 * 1.02  # scales have 8 bits or more
        else:
            assert torch.equal(small.files.stored(name), tensor)
    assert describe_head(small)["bits"] == bits
    assert describe_head(small)["eight_bit"] is (bits == 8)
    sizes = [(folder / "model.safetensors").stat().st_size for folder in (tmp_path / "small", path)]
    assert sizes[0] < share * sizes[1]
    convert_head(tmp_path / "small", tmp_path / "converted")
    again = open_head(tmp_path / "converted")
    assert all(
        torch.equal(again.load(name), small.load(name)) for name in small.spec.shapes if "2" not in name
    )


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_matrices_are_read_in_pieces(tmp_path: Path, bits: int, monkeypatch: pytest.MonkeyPatch):
    path = eagle3(inner=128).save(tmp_path / "head", draft_vocab_size=40)
    if bits < 16:
        quantize_head(open_head(path), tmp_path / "small", bits)
        path = tmp_path / "small"
    head = open_head(path)
    for name in (name for name, shape in head.spec.shapes.items() if len(shape) == 2):
        whole = head.load(name)
        with monkeypatch.context() as patched:
            patched.setattr(type(head.files), "load", _checked_load(type(head.files).load, 24))
            pieces = list(head.pieces(name, 24))
        assert torch.equal(torch.cat(pieces), whole)


def _checked_load(load: Callable[..., torch.Tensor], rows: int) -> Callable[..., torch.Tensor]:
    def checked(*arguments: Any) -> torch.Tensor:
        read = load(*arguments)
        assert len(read) <= rows
        return read

    return checked


def test_a_lent_output_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The rows of the head's vocabulary, as the target's file stores them."""
    monkeypatch.setattr(opening, "_GATHERED_ROWS", 3)
    directory = make_hf_model(tmp_path / "target", "llama", tied=True)
    target = open_checkpoint(write_gguf(directory, tmp_path / "target.gguf", "Q4_1"))
    head = open_head(saved(tmp_path / "head"))
    ids = torch.tensor([3, 49, 50, 51, 120, 7, 359])
    lent = replace(head, output_source=target, token_ids=ids)
    whole = target.load("model.embed_tokens.weight", torch.float32)[ids]
    assert torch.equal(torch.cat(list(lent.pieces("lm_head.weight", 2))), whole)
    blocks = lent.blocks("lm_head.weight")
    assert blocks is not None
    assert (blocks.kind, blocks.shape) == ("Q4_1", (7, 64))
    assert lent.blocks("fc.weight") is None


def test_four_bits_need_whole_groups(tmp_path: Path):
    with pytest.raises(
        RequestError, match="96 columns cannot be rounded to 4 bits, since 96 is not a multiple of 64"
    ):
        quantize_head(open_head(saved(tmp_path / "head")), tmp_path / "small", 4)
    assert not (tmp_path / "small").exists()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["safetensors", "Q8_0"])
def test_rows_of_the_targets_output_are_read_one_by_one(
    tmp_path: Path, kind: str, tied: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(opening, "_PIECE_ROWS", 50)
    path = make_hf_model(tmp_path / "target", "llama", tied=tied)
    if kind != "safetensors":
        path = write_gguf(path, tmp_path / "target.gguf", kind)
    target = open_checkpoint(path)
    whole = target.load("model.embed_tokens.weight" if tied else "lm_head.weight", torch.float32)
    ids = torch.tensor([3, 49, 50, 51, 120, 7, 359])
    assert torch.equal(opening.output_rows(target, ids, torch.float32), whole[ids])
    assert torch.equal(opening.output_rows(target, None, torch.float32), whole)


@pytest.mark.parametrize("bits", [8, 4])
def test_weights_of_any_size_are_rounded_alike(bits: int):
    """Projections of large hidden states have weights near the smallest numbers of half precision."""
    matrix = torch.randn(8, 128, generator=torch.Generator().manual_seed(0))
    for scale in (1.0, 1e-3):
        rounded = expanded(*rounded_levels(matrix * scale, bits), GROUP) / scale
        assert (rounded - matrix).abs().max() < matrix.abs().max() / (100 if bits == 8 else 12)
    assert not rounded_levels(torch.zeros(2, 64), bits)[0].any()


def test_eight_bits_without_their_group_size_are_refused(tmp_path: Path):
    quantize_head(open_head(saved(tmp_path / "head")), tmp_path / "small")
    file = tmp_path / "small" / "config.json"
    config = json.loads(file.read_text())
    del config["quantization_config"]
    file.write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="group_size is missing"):
        open_head(tmp_path / "small").load("fc.weight")


@pytest.mark.parametrize("short", [["_packed"], ["_scale"], ["_packed", "_scale"]])
def test_four_bits_without_all_their_rows_are_refused(tmp_path: Path, short: list[str]):
    plain = saved(tmp_path / "head", TinyHead(VOCAB, draft_vocab=40, inner=128).eagle3())
    quantize_head(open_head(plain), tmp_path / "small", 4)
    file = next((tmp_path / "small").glob("*.safetensors"))
    tensors = load_file(file)
    for end in short:
        tensors[f"fc.weight{end}"] = tensors[f"fc.weight{end}"][:-1].contiguous()
    save_file(tensors, file)
    head = open_head(tmp_path / "small")
    assert readable_blocks(head.packed_tensor, "fc.weight") is None
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        list(head.pieces("fc.weight", HIDDEN // 2 - 1))


def test_floats_beside_an_unknown_quantization_are_not_packed(tmp_path: Path):
    """A head's config may have been copied from a target that is quantised by any method."""
    head = open_head(saved(tmp_path / "head", quantization_config={"quant_method": "bitsandbytes"}))
    assert head.packed_tensor("fc.weight") is None
    assert head.load("fc.weight").isfinite().all()


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        ("eagle", {"fc.weight": (8, 16), QUERY: (8, 8), OUTPUT: (8, 8)}),
        ("eagle3", {"fc.weight": (8, 24), QUERY: (8, 16), OUTPUT: (8, 8)}),
        ("p_eagle", {"mask_hidden": (1, 1, 24), "layers.0.hidden_norm.weight": (8,)}),
        ("dflash", {"fc.weight": (8, 40), "hidden_norm.weight": (8,)}),
        (
            "dspark",
            {"fc.weight": (8, 40), "hidden_norm.weight": (8,), "markov_head.markov_w1.weight": (90, 4)},
        ),
        ("mtp", {"layers.8.eh_proj.weight": (8, 16), "layers.8.enorm.weight": (8,)}),
        ("mtp", {"mtp.fc.weight": (8, 16), "mtp.pre_fc_norm_hidden.weight": (8,)}),
        ("medusa", {"0.0.linear.weight": (8, 8), "0.1.weight": (90, 8)}),
        ("medusa", {"blocks.0.layers.0.weight": (8, 8), "lm_heads.0.weight": (90, 8)}),
        ("mlp_speculator", {"emb.0.weight": (90, 8), "proj.0.weight": (8, 8)}),
        (None, {QUERY: (8, 8), OUTPUT: (8, 8)}),
    ],
)
def test_kinds_are_told_by_their_tensors(kind: str | None, shapes: dict[str, tuple[int, ...]]):
    assert head_kind({canonical_name(name): shape for name, shape in shapes.items()}) == kind


def test_two_names_for_one_tensor_are_refused(tmp_path: Path):
    path = saved(tmp_path / "head")
    tensors = load_file(path / "model.safetensors")
    tensors["midlayer.mlp.up_proj.weight"] = tensors["layers.0.mlp.up_proj.weight"].clone()
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ForewordError, match="are the same"):
        open_head(path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, "is not a head"),
        (lambda path: path.mkdir(), "holds no safetensors"),
        (
            lambda path: (path.mkdir(), (path / "model.safetensors").write_bytes(b"no")),
            "not a whole safetensors",
        ),
    ],
)
def test_what_is_no_head_at_all(tmp_path: Path, write: Callable[[Path], Any], message: str):
    write(tmp_path / "head")
    with pytest.raises(CheckpointError, match=message):
        open_head(tmp_path / "head")
