"""What a decoder keeps of its tokens: KV rows, and states of recurrent layers."""

from foreword.errors import CheckpointError
from foreword.kv.spec import DECODER_ROWS, RowSpec, StateSpec
from foreword.models.config import ModelConfig, RecurrentSpec


def state_spec(config: ModelConfig, item_bytes: int) -> StateSpec | None:
    """Return what recurrent layers keep; None: there are none. `item_bytes` is the size of an activation."""
    if config.recurrent is None:
        return None
    return spec_of_states(
        config.recurrent, sum(layer.recurrent is not None for layer in config.layers), item_bytes
    )


def spec_of_states(spec: RecurrentSpec, layers: int, item_bytes: int) -> StateSpec:
    """Return what this many layers of a recurrence keep."""
    return StateSpec(
        num_layers=layers,
        channels=spec.channels,
        kernel=spec.kernel,
        heads=spec.heads,
        value_dim=spec.value_dim,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        item_bytes=item_bytes,
    )


def kv_rows(config: ModelConfig, dtype: str) -> RowSpec:
    """Return keys and values of all layers with attention; with latent attention, one row for both."""
    attending = [layer.attention for layer in config.layers if layer.has_attention]
    shapes = {attention.kept for attention in attending}
    if not shapes:
        raise CheckpointError(
            f"no layer of this {config.architecture} model has attention; use another model"
        )
    if len(shapes) != 1:
        raise CheckpointError(f"the layers of this {config.architecture} model keep rows of different sizes")
    heads, dim, values = shapes.pop()
    return RowSpec(DECODER_ROWS, len(attending), heads, dim, values, config.widest_window, dtype)
