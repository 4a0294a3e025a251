"""Which hidden states of the target a head reads: many ways to count layers, brought to one.

A boundary is the residual stream after so many layers; 0 is the embedding, and the last is before the final norm.
"""

from collections.abc import Mapping

from foreword.errors import CheckpointError
from foreword.models.formats.fields import ConfigFields

IDS = "eagle_aux_hidden_state_layer_ids"


def named_boundaries(fields: ConfigFields) -> tuple[int, ...] | None:
    """What the config says; None if it says nothing.

    At the top level (vLLM, speculators) an id is a boundary. Inside `eagle_config` (SGLang, SpecForge, Model-Optimizer)
    and as `target_layer_ids` (DeepSpec) it is the number of a layer, whose output is meant.
    """
    nested = fields.get("eagle_config")
    inner = ConfigFields(nested if isinstance(nested, Mapping) else {}, fields.origin)
    found = {
        ids
        for ids in (
            layer_ids(fields, IDS, 0),
            layer_ids(inner, IDS, 1),
            layer_ids(fields, "target_layer_ids", 1),
        )
        if ids
    }
    if len(found) > 1:
        raise CheckpointError(
            f"{fields.origin}: it names different layers of the target in two places, counted in different ways; "
            f"leave one of {IDS} and eagle_config.{IDS}"
        )
    return found.pop() if found else None


def layer_ids(fields: ConfigFields, key: str, offset: int) -> tuple[int, ...]:
    """The list under `key` as boundaries, each `offset` higher; empty if there is none."""
    ids = fields.get(key)
    if ids is None:
        return ()
    if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise fields.malformed(key, "a list of layers")
    return tuple(i + offset for i in ids)


def usual_boundaries(num_layers: int) -> tuple[int, ...]:
    """Those of a head that names none: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


def spread_boundaries(num_layers: int, taps: int) -> tuple[int, ...]:
    """Those of a head that names none, spread over the target's layers."""
    if taps == 1:
        return (num_layers // 2 + 1,)
    return tuple(round(1 + i * (num_layers - 4) / (taps - 1)) + 1 for i in range(taps))
