"""Memory of recurrent layers."""

from foreword.kv.spec import StateSpec
from foreword.models.config import ModelConfig


def state_spec(config: ModelConfig, item_bytes: int) -> StateSpec | None:
    """Return what recurrent layers keep; None: there are none. `item_bytes` is the size of an activation."""
    spec = config.recurrent
    if spec is None:
        return None
    return StateSpec(
        num_layers=sum(layer.recurrent is not None for layer in config.layers),
        channels=spec.channels,
        kernel=spec.kernel,
        heads=spec.heads,
        value_dim=spec.value_dim,
        key_heads=spec.key_heads,
        key_dim=spec.key_dim,
        item_bytes=item_bytes,
    )
