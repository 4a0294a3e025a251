"""Reads MTP (NextN) modules, which are stored in their targets' checkpoints under various names."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.errors import CheckpointError
from foreword.models.architectures.hybrids import QWEN3_NEXT
from foreword.models.config import LayerSpec, RopeSpec
from foreword.models.formats.fields import ConfigFields, check_experts
from foreword.models.formats.hf.config import hf_family, layer_after_last
from foreword.models.formats.hf.rope import rope_spec
from foreword.models.heads.files import HeadFiles, checked_shapes, vocabulary_shapes
from foreword.models.heads.names import read_layers
from foreword.models.heads.published import build_head_spec
from foreword.models.heads.spec import HeadSpec, Join
from foreword.models.layer_shapes import layer_shapes


@dataclass(frozen=True)
class MtpLayout:
    """How a model family stores its MTP modules."""

    family: str
    # Name of the matrix that projects embedding and hidden state to one row; group 1 is the module's prefix.
    join: re.Pattern[str]
    names: Mapping[str, str]  # name after the prefix -> canonical name; all others belong to the layer
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
"""Known layouts. If a checkpoint has several MTP modules, only the first one drafts, as in other engines."""

_FAMILY_TENSORS = re.compile(r"self_attn\.kv_a_proj_with_mqa\.|mlp\.(experts|gate)\.")
"""Tensors of latent attention and of experts, which Llama layers do not have.

The layer of a module with such tensors, if its attention is not gated, is read as a layer of the model's own family.
"""


def mtp_files(files: HeadFiles) -> HeadFiles:
    """Return a view with only the tensors of the first MTP module, by canonical names."""
    names = sorted(files.shapes)
    modules = [
        (layout, match[1]) for layout in LAYOUTS for name in names if (match := layout.join.match(name))
    ]
    if not modules:
        raise CheckpointError(
            f"{files.path} holds no MTP module; use a checkpoint that has one, or another method"
        )
    layout, prefix = modules[0]
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
    layer, rope, interleaved = _layer(fields, files)
    hidden, vocab = fields.count("hidden_size"), fields.count("vocab_size")
    required, optional = vocabulary_shapes(vocab, vocab, hidden)
    required = {
        **required,
        **{f"layers.0.{name}": shape for name, shape in layer_shapes(layer, hidden).items()},
        "fc.weight": (hidden, 2 * hidden),
        **{f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "norm")},
    }
    return build_head_spec(
        "mtp",
        Join.FUSED,
        fields,
        (layer,),
        checked_shapes(files, required, optional),
        rope=rope,
        norm_output=True,  # the module reads its own normalised states to draft the next token
        interleaved=interleaved,
        norms_minus_one=layer.attention.gated,  # gated modules store norms minus one
        # The first columns of MiMo's input_proj are for the hidden state, those of other layouts for the embedding.
        hidden_first=files.stored_as("fc.weight").endswith("input_proj.weight"),
    )


def _layer(fields: ConfigFields, files: HeadFiles) -> tuple[LayerSpec, RopeSpec, bool]:
    """Return the module's layer, its rotary embedding, and whether rotated pairs are adjacent in the stored weights.

    The layer is a Llama layer, a layer of the model's own family, or one with gated attention (Qwen3-Next, Qwen3.5).
    The query projection of gated attention has twice as many rows as the output projection has columns.
    """
    query = files.shapes.get("layers.0.self_attn.q_proj.weight", (0, 0))
    output = files.shapes.get("layers.0.self_attn.o_proj.weight", (0, 0))
    is_gated = query[0] == 2 * output[1] > 0
    if is_gated:  # the layers of Qwen3.5 and Qwen3-Next are equal, except that some have no experts
        has_experts = "layers.0.mlp.gate.weight" in files.shapes
        family = QWEN3_NEXT if has_experts else replace(QWEN3_NEXT, experts=None)
    elif any(map(_FAMILY_TENSORS.search, files.shapes)):
        family = hf_family(fields.values, Path(fields.origin))
    else:
        return read_layers(fields, files.shapes, count=1)[0], rope_spec(fields), False
    layer = layer_after_last(fields, family)
    check_experts((f"model.{name}" for name in files.shapes), [layer], str(files.path))
    return layer, rope_spec(fields, family.rope, layer.attention.rotary_dim), family.rope.interleaved


def _require_runnable(files: HeadFiles) -> None:
    """Raise `CheckpointError` for modules that no backend can run."""
    reason = ""
    if any("self_attn.qkv_proj." in name for name in files.shapes):
        reason = "one matrix for queries, keys and values"
    elif "swa_num_attention_heads" in files.config:
        reason = "sliding-window attention"
    if reason:
        raise CheckpointError(
            f"{files.path}: its MTP module has {reason}, which cannot be run yet; use another method"
        )
