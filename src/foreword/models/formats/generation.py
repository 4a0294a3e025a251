"""The sampling parameters that a model's makers recommend, as its files tell them."""

import sys
from collections.abc import Mapping
from typing import Any

from foreword.errors import CheckpointError

HF_KEYS = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
"""Keys of generation_config.json that are read, as vLLM reads them; `do_sample` and the others are not."""

GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Where llama.cpp's converter puts the same."""


def sampling_values(values: Mapping[str, Any], names: Mapping[str, str], origin: str) -> dict[str, float]:
    """Sampling parameters by our names; absent and null ones are left out, what is no number is refused."""
    found: dict[str, float] = {}
    for key, name in names.items():
        value = values.get(key)
        if value is None:
            continue
        if not _is_number(value):
            shown = repr(value)[:60]
            raise CheckpointError(f"{origin}: {key} is {shown}, not a number; get the file again")
        # GGUF has 32 bits: 0.95 comes back as 0.949999988.
        found[name] = value if isinstance(value, int) else float(f"{value:.7g}")
    return found


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # whole numbers of JSON have no bound
