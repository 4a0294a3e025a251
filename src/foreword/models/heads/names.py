"""Reads what the layouts of heads have in common: tensor names, tapped layers, shapes of layers, methods."""

import re
from collections.abc import Iterable, Mapping, Sequence

from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec
from foreword.models.formats.fields import ConfigFields, check_heads
from foreword.models.heads.spec import SELECTOR, Shapes
from foreword.models.layer_shapes import layer_shapes

SCALE = "_scale"  # suffix of the scales of a quantised matrix

PACKED, SHAPE = "_packed", "_shape"
"""Suffixes in compressed-tensors' format: of the levels, packed into 32-bit words, and of the matrix's shape."""

PART_SUFFIXES = (
    SCALE,
    "_scale_inv",
    PACKED,
    SHAPE,
)  # suffixes of all tensors that belong to a quantised matrix

OUTPUT = "lm_head.weight"
"""The output matrix. A head without one uses rows of the target's matrix: those of its draft vocabulary."""

FOREWORD_FORMAT = "foreword"  # `quant_method` of 8-bit heads that Foreword writes

FOREWORD_FORMATS = (FOREWORD_FORMAT, "foreword-int8")
"""Values of `quant_method` that are read as Foreword's format. The shipped head has the second, of an older version."""

_RENAMED = (
    (re.compile(r"^model\."), ""),  # vLLM's prefix
    (re.compile(r"^midlayer\."), "layers.0."),  # EAGLE-3 and SpecForge
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),  # SGLang
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
    # Medusa, in vLLM's naming.
    (re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\."), r"blocks.\1.layers.\2."),
    (re.compile(r"^(?:medusa_heads?\.)?(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
)
_LATER_NORM = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.")
_DERIVED = "rotary_emb.inv_freq"


def canonical_name(name: str) -> str:
    """Return the canonical name of a head's tensor: speculators' name, or for Medusa our own."""
    for pattern, plain in _RENAMED:
        name = pattern.sub(plain, name)
    # SGLang's name of the norm before attention in later layers.
    return _LATER_NORM.sub(r"layers.\1.input_layernorm.", name)


def canonical_names(names: Iterable[str], origin: str) -> dict[str, str]:
    """Return canonical name -> stored name, without tensors that are computed from the config."""
    stored_names: dict[str, str] = {}
    for name in names:
        if name.endswith(_DERIVED):
            continue
        canonical = canonical_name(name)
        if canonical in stored_names:
            raise CheckpointError(
                f"{origin}: tensors {stored_names[canonical]} and {name} are the same; get the head again"
            )
        stored_names[canonical] = name
    return stored_names


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"  # config key of the layers that a head reads


def named_boundaries(fields: ConfigFields) -> tuple[int, ...] | None:
    """Return the layer boundaries that the config names; None if it names none.

    Boundary i is after the first i layers. At the top level (vLLM, speculators) ids are boundaries. In `eagle_config`
    (SGLang, SpecForge, Model-Optimizer) and in `target_layer_ids` (DeepSpec) an id is the index of the layer whose
    output is read.
    """
    nested = fields.get("eagle_config")
    inner = ConfigFields(nested if isinstance(nested, Mapping) else {}, fields.origin)
    stated = {
        layer_ids(fields, LAYER_IDS, 0),
        layer_ids(inner, LAYER_IDS, 1),
        layer_ids(fields, "target_layer_ids", 1),
    } - {()}
    if len(stated) > 1:
        raise CheckpointError(
            f"{fields.origin}: it names different layers of the target in two places, counted in different ways; "
            f"leave one of {LAYER_IDS} and eagle_config.{LAYER_IDS}"
        )
    return stated.pop() if stated else None


def layer_ids(fields: ConfigFields, key: str, offset: int) -> tuple[int, ...]:
    """Return the list under `key` with `offset` added to each id; empty if it is missing."""
    ids = fields.get(key)
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise fields.malformed(key, "a list of layers")
    return tuple(i + offset for i in ids)


def usual_boundaries(num_layers: int) -> tuple[int, ...]:
    """Return the boundaries that EAGLE-3 heads read by default: low, middle and high."""
    return (2, num_layers // 2, num_layers - 3)


def spread_boundaries(num_layers: int, taps: int) -> tuple[int, ...]:
    """Return the boundaries that DFlash heads read by default: evenly spaced."""
    if taps == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (taps - 1)) + 1 for i in range(taps))


def read_layers(fields: ConfigFields, present: Shapes, count: int | None = None) -> tuple[LayerSpec, ...]:
    """Return the head's layers: sizes from the config, biases and head norms if their tensors are `present`.

    Configs are often wrong about biases and norms. `count` replaces the config's number of layers.
    """
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.unsupported(f"activation {activation!r}")
    heads = fields.count("num_attention_heads")

    def layer(index: int) -> LayerSpec:
        def has(name: str) -> bool:
            return f"layers.{index}.{name}" in present

        attention = AttentionSpec(
            num_heads=heads,
            num_kv_heads=fields.count("num_key_value_heads", heads),
            head_dim=fields.count("head_dim", fields.count("hidden_size") // heads or None),
            bias=has("self_attn.q_proj.bias"),
            output_bias=has("self_attn.o_proj.bias"),
            qk_norm=has("self_attn.q_norm.weight"),
        )
        mlp = MlpSpec(fields.count("intermediate_size"), bias=has("mlp.gate_proj.bias"))
        return LayerSpec(check_heads(attention, fields.origin), mlp)

    return tuple(layer(index) for index in range(count or fields.count("num_hidden_layers", 1)))


def sliding_window(fields: ConfigFields, layers: int) -> int | None:
    """Return the window of a head whose layers all have one; None if none has.

    Without `layer_types`, a `sliding_window` counts only if `use_sliding_window` is true: many configs of heads are
    copies of their target's.
    """
    kinds = fields.get("layer_types")
    if kinds is None:
        return fields.count("sliding_window") if fields.flag("use_sliding_window", False) else None
    if not isinstance(kinds, list) or len(kinds) < layers:
        raise fields.malformed("layer_types", f"a list of {layers} kinds of attention")
    has_window = {kind == "sliding_attention" for kind in kinds[:layers]}
    if len(has_window) > 1:
        raise fields.unsupported("a head with full and sliding attention")
    return fields.count("sliding_window") if True in has_window else None


def all_layer_shapes(
    layers: Sequence[LayerSpec], hidden: int, *, first_inputs: int, first_norm: bool
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of all layers. The attention of the first layer reads `first_inputs` numbers.

    `first_norm`: the first layer has a norm before its attention, as the others do.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for index, layer in enumerate(layers):
        in_layer = layer_shapes(layer, hidden)
        for name in ("q", "k", "v"):
            projection = f"self_attn.{name}_proj.weight"
            in_layer[projection] = (in_layer[projection][0], hidden if index else first_inputs)
        if not index and not first_norm:
            del in_layer["input_layernorm.weight"]
        shapes |= {f"layers.{index}.{name}": shape for name, shape in in_layer.items()}
    return shapes


def mask_token(fields: ConfigFields, vocab: int) -> int:
    """Return the id of the mask token, under any of its keys."""
    section = fields.get("dflash_config")
    nested = ConfigFields(section if isinstance(section, Mapping) else {}, fields.origin)
    for settings, key in (
        (nested, "mask_token_id"),
        (fields, "mask_token_id"),
        (fields, "pard_token"),
        (fields, "ptd_token_id"),
    ):
        token = settings.get(key)
        if token is None:
            continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
            raise settings.malformed(key, f"a token id in 0 .. {vocab - 1}")
        return token
    raise CheckpointError(f"{fields.origin}: mask_token_id is missing; get the head again")


_MEDUSA = re.compile(r"^blocks\.\d+\.layers\.\d+\.weight$")
_MTP = re.compile(r"(^|\.)(enorm|pre_fc_norm_hidden|eh_proj|input_proj)\.weight$")


def head_kind(shapes: Shapes) -> str | None:
    """Return the method of a head, recognised by its tensors; None: unknown."""
    query = shapes.get("layers.0.self_attn.q_proj.weight", ())
    output = shapes.get("layers.0.self_attn.o_proj.weight", ())
    fc = shapes.get("fc.weight", ())
    is_kind = {  # the first that holds decides
        "dspark": "markov_head.markov_w1.weight" in shapes,
        "dflash2": any("_conv.base_kernel" in name or name in SELECTOR for name in shapes),
        "p_eagle": "mask_hidden" in shapes,
        "dflash": "hidden_norm.weight" in shapes,
        "mtp": any(map(_MTP.search, shapes)),
        # The first attention reads the embedding and the target's hidden states, concatenated.
        "eagle3": len(query) == 2 and len(output) == 2 and query[1] == 2 * output[0],
        "eagle": len(fc) == 2 and fc[1] == 2 * fc[0],  # fc reads both, concatenated
        "medusa": any(map(_MEDUSA.search, shapes)),
        "mlp_speculator": "emb.0.weight" in shapes,
    }
    return next((kind for kind, holds in is_kind.items() if holds), None)
