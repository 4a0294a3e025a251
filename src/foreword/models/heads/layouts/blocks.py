"""The layers of a head: llama's, with what the file has of biases and norms."""

from foreword.models.config import AttentionSpec, LayerSpec, MlpSpec, NormSpec
from foreword.models.formats.fields import ConfigFields, check_heads
from foreword.models.heads.spec import Shapes


def read_layers(fields: ConfigFields, present: Shapes, count: int | None = None) -> tuple[LayerSpec, ...]:
    """Sizes from the config; biases and head norms from the tensors, which configs are often wrong about.

    Without a `count` there are as many layers as the config says.
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


def read_norm(fields: ConfigFields) -> NormSpec:
    return NormSpec(fields.number("rms_norm_eps", 1e-6))


def layer_shapes(index: int, layer: LayerSpec, hidden: int, inputs: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer whose attention reads `inputs` numbers; the norm before it is the caller's affair."""
    prefix, attention, mlp = f"layers.{index}.", layer.attention, layer.mlp
    linears = {
        "self_attn.q_proj": (attention.query_width, inputs, attention.bias),
        "self_attn.k_proj": (attention.kv_width, inputs, attention.bias),
        "self_attn.v_proj": (attention.kv_width, inputs, attention.bias),
        "self_attn.o_proj": (hidden, attention.query_width, attention.output_bias),
        "mlp.gate_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "mlp.up_proj": (mlp.intermediate_size, hidden, mlp.bias),
        "mlp.down_proj": (hidden, mlp.intermediate_size, mlp.bias),
    }
    shapes: dict[str, tuple[int, ...]] = {prefix + "post_attention_layernorm.weight": (hidden,)}
    if attention.qk_norm:
        shapes |= {prefix + f"self_attn.{name}_norm.weight": (attention.head_dim,) for name in "qk"}
    for name, (rows, columns, bias) in linears.items():
        shapes[prefix + name + ".weight"] = (rows, columns)
        if bias:
            shapes[prefix + name + ".bias"] = (rows,)
    return shapes
