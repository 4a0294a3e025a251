"""One set of tensor names for all who write heads."""

import re
from collections.abc import Iterable

from foreword.errors import CheckpointError

SCALE = "_scale"
"""Put behind a matrix's name, it names the scales of its 8-bit numbers."""

SCALES = (SCALE, "_scale_inv")
"""The same in files of others."""

OURS = "foreword"
"""The `quant_method` of heads that are written here."""

OUR_NAMES = (OURS, "foreword-int8")
"""Those that are read: the head that ships was written by an earlier version."""

_RENAMED = (
    (re.compile(r"^model\."), ""),  # vLLM's prefix
    (re.compile(r"^midlayer\."), "layers.0."),  # EAGLE-3 and SpecForge
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),  # SGLang
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
    (
        re.compile(r"^(?:medusa_heads?\.)?(\d+)\.(\d+)\.linear\."),
        r"blocks.\1.layers.\2.",
    ),  # Medusa, as vLLM has it
    (re.compile(r"^(?:medusa_heads?\.)?(\d+)\.\d+\.weight"), r"lm_heads.\1.weight"),
)
_LATER_NORM = re.compile(r"^layers\.([1-9]\d*)\.hidden_norm\.")
_DERIVED = "rotary_emb.inv_freq"


def canonical_name(name: str) -> str:
    """The name that speculators gives to a tensor of this name."""
    for pattern, plain in _RENAMED:
        name = pattern.sub(plain, name)
    # SGLang's name of the norm before attention in layers that only read the layer before.
    return _LATER_NORM.sub(r"layers.\1.input_layernorm.", name)


def canonical_names(names: Iterable[str], origin: str) -> dict[str, str]:
    """Canonical name -> name in the file; what can be computed anew is left out."""
    found: dict[str, str] = {}
    for name in names:
        if name.endswith(_DERIVED):
            continue
        plain = canonical_name(name)
        if plain in found:
            raise CheckpointError(
                f"{origin}: tensors {found[plain]} and {name} are the same; get the head again"
            )
        found[plain] = name
    return found
