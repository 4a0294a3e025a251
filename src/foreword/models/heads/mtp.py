"""Reads MTP (NextN) modules, which are stored in their targets' checkpoints under various names."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.errors import CheckpointError
from foreword.models.architectures.architecture import Architecture, ConfigSwitch, Rope
from foreword.models.architectures.mixtures import GATED_EXPERTS, QWEN2_MOE
from foreword.models.config import LayerSpec, RopeSpec
from foreword.models.formats.fields import ConfigFields, check_experts
from foreword.models.formats.hf.config import hf_family, layer_after_last
from foreword.models.formats.hf.rope import rope_spec
from foreword.models.heads.files import HeadFiles, checked_shapes, vocabulary_shapes
from foreword.models.heads.names import read_layers
from foreword.models.heads.published import described
from foreword.models.heads.spec import HeadSpec, Join, Shapes
from foreword.models.layer_shapes import layer_shapes


@dataclass(frozen=True)
class MtpLayout:
    """How a model family stores its MTP modules."""

    family: str
    join: re.Pattern[
        str
    ]  # name of the matrix that joins embedding and hidden state; group 1: the module's prefix
    names: Mapping[str, str]  # name after the prefix -> canonical name; other tensors belong to the layer
    hidden_first: bool = False  # the matrix reads the hidden state before the embedding
    layer: str = ""  # prefix of the layer's tensors in the module


_DEEPSEEK = {
    "enorm": "enorm",
    "hnorm": "hnorm",
    "eh_proj": "fc",
    "shared_head.norm": "norm",
    "shared_head.head": "lm_head",
    "embed_tokens": "embed_tokens",
}

LAYOUTS = (
    MtpLayout(
        "MiMo",
        re.compile(r"^(mtp_layers\.0\.)input_proj\.weight$"),
        {
            "token_layernorm": "enorm",
            "hidden_layernorm": "hnorm",
            "input_proj": "fc",
            "final_layernorm": "norm",
        },
        hidden_first=True,
    ),
    MtpLayout(
        "MiMo-V2",
        re.compile(r"^(mtp\.layers\.0\.)eh_proj\.weight$"),
        {**_DEEPSEEK, "final_layernorm": "norm", "pre_mlp_layernorm": "layers.0.post_attention_layernorm"},
    ),
    MtpLayout(
        "Qwen3-Next",
        re.compile(r"^(mtp\.)fc\.weight$"),
        {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "fc", "norm": "norm"},
        layer="layers.0.",
    ),
    MtpLayout("DeepSeek", re.compile(r"^(layers\.\d+\.)eh_proj\.weight$"), _DEEPSEEK),
)
"""Known layouts. Of several modules, only the first one is used, for all draft tokens, as in other engines."""

GATED_LAYERS = replace(
    QWEN2_MOE,
    name="qwen3_next",
    models="Qwen3-Next, Qwen3.5",
    attention_bias=ConfigSwitch(key="attention_bias"),
    output_bias=ConfigSwitch(key="attention_bias"),
    qk_norm=ConfigSwitch(always=True),
    rope=Rope(partial=0.25),
    window=None,
    experts=replace(GATED_EXPERTS, normalize=ConfigSwitch(key="norm_topk_prob", default=True)),
)
"""The family of the layers in MTP modules with gated attention."""

_FAMILY_TENSORS = re.compile(r"self_attn\.kv_a_proj_with_mqa\.|mlp\.(experts|gate)\.")
"""Tensors that a layer of Llama's kind does not have: the module's layer is one of the model's own family."""


def mtp_layout(shapes: Shapes) -> tuple[MtpLayout, str] | None:
    """Return the layout of the first module, and the prefix of its tensors; None: there is no module."""
    for layout in LAYOUTS:
        prefixes = sorted(match[1] for name in shapes if (match := layout.join.match(name)))
        if prefixes:
            return layout, prefixes[0]
    return None


def mtp_files(files: HeadFiles) -> HeadFiles:
    """Return a view with only the tensors of the first MTP module, by canonical names."""
    layout_and_prefix = mtp_layout(files.shapes)
    if layout_and_prefix is None:
        raise CheckpointError(
            f"{files.path} holds no MTP module; use a checkpoint that has one, or another method"
        )
    layout, prefix = layout_and_prefix
    renamed: dict[str, str] = {}
    for name in files.shapes:
        if name.startswith(prefix):
            part, _, suffix = name.removeprefix(prefix).rpartition(".")
            layer_part = part.removeprefix(layout.layer).replace("shared_expert.", "shared_experts.")
            renamed[f"{layout.names.get(part, 'layers.0.' + layer_part)}.{suffix}"] = name
    return files.renamed(renamed)


def read_mtp(files: HeadFiles) -> HeadSpec:
    """Return the description of an MTP module as a head; raise `CheckpointError` if no backend can run it."""
    fields = files.fields.section("text_config") or files.fields
    _require_runnable(files)
    layer, rope, interleaved = _reader(files)(fields, files)
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    required, optional = vocabulary_shapes(vocab, vocab, hidden)
    required = {
        **required,
        **{f"layers.0.{name}": shape for name, shape in layer_shapes(layer, hidden).items()},
        "fc.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")},
    }
    return described(
        "mtp",
        Join.FUSED,
        fields,
        (layer,),
        checked_shapes(files, required, optional),
        rope=rope,
        norm_output=True,  # for its next draft token the module reads its own normalised states
        interleaved=interleaved,
        norms_minus_one=layer.attention.gated,  # gated modules store norms minus one
        hidden_first=_stored_hidden_first(files),
    )


def _reader(files: HeadFiles) -> Callable[[ConfigFields, HeadFiles], tuple[LayerSpec, RopeSpec, bool]]:
    """Return the function that reads this module's layer, its rotary embedding, and whether it is interleaved."""
    query, output = (files.shapes.get(f"layers.0.self_attn.{name}_proj.weight", (0, 0)) for name in "qo")
    if query[0] == 2 * output[1] > 0:
        return _gated_layer
    is_of_family = any(map(_FAMILY_TENSORS.search, files.shapes))
    return _family_layer if is_of_family else _llama_layer


def _llama_layer(fields: ConfigFields, files: HeadFiles) -> tuple[LayerSpec, RopeSpec, bool]:
    """Read a module whose layer is of Llama's kind."""
    return read_layers(fields, files.shapes, count=1)[0], rope_spec(fields), False


def _family_layer(fields: ConfigFields, files: HeadFiles) -> tuple[LayerSpec, RopeSpec, bool]:
    """Read a module whose layer is of the same family as the model's layers."""
    return _layer_of(hf_family(fields.values, Path(fields.origin)), fields, files)


def _gated_layer(fields: ConfigFields, files: HeadFiles) -> tuple[LayerSpec, RopeSpec, bool]:
    """Read a module of Qwen3-Next or Qwen3.5: gated attention, with or without experts."""
    has_experts = "layers.0.mlp.gate.weight" in files.shapes
    family = GATED_LAYERS if has_experts else replace(GATED_LAYERS, experts=None)
    layer, rope, interleaved = _layer_of(family, fields, files)
    return replace(layer, attention=replace(layer.attention, gated=True)), rope, interleaved


def _layer_of(
    family: Architecture, fields: ConfigFields, files: HeadFiles
) -> tuple[LayerSpec, RopeSpec, bool]:
    """Read a module whose layer is of the given family."""
    layer = layer_after_last(fields, family)
    check_experts((f"model.{name}" for name in files.shapes), [layer], str(files.path))
    return layer, rope_spec(fields, family.rope, layer.attention.rotary_dim), family.rope.interleaved


def _require_runnable(files: HeadFiles) -> None:
    """Raise `CheckpointError` for modules that no backend can run."""
    reasons = []
    if any("self_attn.qkv_proj." in name for name in files.shapes):
        reasons.append("one matrix for queries, keys and values")
    if "swa_num_attention_heads" in files.config:
        reasons.append("sliding-window attention")
    if reasons:
        raise CheckpointError(
            f"{files.path}: its MTP module has {reasons[0]}, which cannot be run yet; use another method"
        )


def _stored_hidden_first(files: HeadFiles) -> bool:
    """Return whether fc.weight reads the hidden state before the embedding: it does if it is named input_proj."""
    return files.stored_as("fc.weight").endswith("input_proj.weight")
