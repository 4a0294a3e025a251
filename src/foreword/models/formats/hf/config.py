"""config.json of a Hugging Face model as a ModelConfig."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.config import LinearRopeScaling, Llama3RopeScaling, ModelConfig, RopeScaling
from foreword.models.formats.fields import ConfigFields, check_config, windowed_context

HF_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
"""Class name in config.json -> family. The class itself is never imported or run."""


def hf_config(values: Mapping[str, Any], names: frozenset[str], path: Path) -> ModelConfig:
    """The config that config.json describes; `names` are the tensors that the files hold."""
    fields = ConfigFields(values, str(path))
    architecture = _architecture(fields)
    _refuse_variants(fields)
    heads = fields.count("num_attention_heads")
    hidden = fields.count("hidden_size")
    # Llama and Qwen3 put their bias switch on all four projections, Qwen2 has it always and on three.
    biased = architecture in ("llama", "qwen3") and fields.flag("attention_bias", False)
    rope = _rope_fields(fields)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=fields.count("vocab_size"),
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_layers=fields.count("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.count("num_key_value_heads", heads if architecture == "llama" else None),
        head_dim=fields.count("head_dim", hidden // heads or None),
        context_length=_context_length(fields, architecture),
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope_theta=rope.number("rope_theta", 10000.0),
        rope_scaling=_rope_scaling(rope),
        attention_bias=biased or architecture == "qwen2",
        output_bias=biased,
        mlp_bias=architecture == "llama" and fields.flag("mlp_bias", False),
        qk_norm=architecture == "qwen3",
        tied_embeddings=fields.flag("tie_word_embeddings", "lm_head.weight" not in names),
    )
    return check_config(config, fields.origin)


def _architecture(fields: ConfigFields) -> str:
    named = fields.get("architectures")
    name = named[0] if isinstance(named, list) and len(named) == 1 else None
    if not isinstance(name, str) or name not in HF_ARCHITECTURES:
        raise CheckpointError(
            f"{fields.origin}: architecture {named!r} is not supported; use {', '.join(HF_ARCHITECTURES)}"
        )
    return HF_ARCHITECTURES[name]


def _refuse_variants(fields: ConfigFields) -> None:
    if fields.get("quantization_config") is not None:
        raise CheckpointError(
            f"{fields.origin}: weights quantised in Hugging Face's formats are not supported; "
            "use the unquantised model or a GGUF file"
        )
    activation = fields.text("hidden_act", "silu")
    if activation != "silu":
        raise fields.unsupported(f"activation {activation!r}")


def _context_length(fields: ConfigFields, architecture: str) -> int:
    context = fields.count("max_position_embeddings")
    if architecture == "mistral":
        window = fields.get("sliding_window")
        return windowed_context(context, None if window is None else fields.count("sliding_window"))
    if architecture in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False):
        raise fields.unsupported("a sliding window in some layers (use_sliding_window)")
    return context


def _rope_fields(fields: ConfigFields) -> ConfigFields:
    """Rotary settings, found as transformers finds them.

    They are in `rope_parameters` (transformers 5) or in `rope_scaling` (before it). With both, the older section
    counts and the newer one is not looked at; what a section leaves open stands beside it.
    """
    merged: dict[str, Any] = {key: fields.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    merged["original_max_position_embeddings"] = fields.get("max_position_embeddings")
    sections = {key: fields.get(key) for key in ("rope_scaling", "rope_parameters")}
    for key, section in sections.items():
        if section is not None and not isinstance(section, Mapping):
            raise fields.malformed(key, "an object")
    merged |= sections["rope_scaling"] or sections["rope_parameters"] or {}
    if (trained := fields.get("original_max_position_embeddings")) is not None:
        merged["original_max_position_embeddings"] = trained
    return ConfigFields(merged, fields.origin)


def _rope_scaling(rope: ConfigFields) -> RopeScaling | None:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if rope.number("partial_rotary_factor", 1.0) != 1.0:
        raise rope.unsupported("rotating a part of each head (partial_rotary_factor)")
    if any(isinstance(value, Mapping) for value in rope.values.values()):
        raise rope.unsupported("rope settings that differ between layers")
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(rope.number("factor"))
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_context=rope.count("original_max_position_embeddings"),
        )
    raise rope.unsupported(f"rope scaling {kind!r}")
