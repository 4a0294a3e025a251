"""What the decoders here can run; anything else is refused by name before its weights are read."""

from foreword.errors import CheckpointError
from foreword.models.config import LayerSpec, ModelConfig


def require_supported(config: ModelConfig, backend: str) -> LayerSpec:
    """What every layer of the model looks like, or a refusal that says what the backend cannot run."""
    if not config.layers:
        raise CheckpointError(f"the {config.architecture} model has no layers; use another")
    found = [what for layer in config.layers for what in _foreign_parts(layer, config.context_length)]
    if config.norm.kind != "rms":
        found.append(f"{config.norm.kind} norms")
    if not found and any(layer != config.layers[0] for layer in config.layers):
        found.append("layers that differ")
    if found:
        raise CheckpointError(
            f"the {backend} backend cannot run this {config.architecture} model: "
            f"{', '.join(dict.fromkeys(found))} is not supported; use another model"
        )
    return config.layers[0]


def _foreign_parts(layer: LayerSpec, context_length: int) -> list[str]:
    found = []
    if layer.mlp.activation != "silu":
        found.append(f"activation {layer.mlp.activation!r}")
    if layer.mlp.num_experts:
        found.append("a mixture of experts")
    if layer.attention.window is not None and layer.attention.window < context_length:
        found.append("a sliding window")
    return found
