"""Which scheme a config.json names, and which stored tensors make up which matrix."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.formats.fields import ConfigFields
from foreword.models.formats.hf.packed.awq import awq_scheme
from foreword.models.formats.hf.packed.compressed import compressed_scheme
from foreword.models.formats.hf.packed.floats import fp8_scheme
from foreword.models.formats.hf.packed.gptq import gptq_scheme
from foreword.models.formats.hf.packed.scheme import Parts, Scheme

SCHEMES = {
    "gptq": gptq_scheme,
    "awq": awq_scheme,
    "compressed-tensors": compressed_scheme,
    "fp8": fp8_scheme,
}
"""By `quant_method`."""


def scheme_of(fields: ConfigFields) -> Scheme | None:
    """The scheme of a model's matrices; None: they are stored as plain floats."""
    section = fields.get("quantization_config") or fields.get("compression_config")
    if section is None:
        return None
    if not isinstance(section, Mapping):
        raise fields.malformed("quantization_config", "an object")
    method = ConfigFields(section, fields.origin).text("quant_method")
    if method not in SCHEMES:
        raise CheckpointError(
            f"{fields.origin}: weights quantised by {method[:60]!r} are not supported; use one of "
            f"{', '.join(SCHEMES)}, the unquantised model or a GGUF file"
        )
    return SCHEMES[method](fields, section)


def packed_matrices(names: Iterable[str], scheme: Scheme | None) -> dict[str, dict[str, str]]:
    """Name of every tensor -> its parts, part -> stored name; a plain one has the part "" alone."""
    present = set(names)
    parts_of: dict[str, dict[str, str]] = {}
    taken: set[str] = set()
    if scheme is not None:
        for name in sorted(present):
            stem, _, last = name.rpartition(".")
            if last != scheme.marker or not all(f"{stem}.{part}" in present for part in scheme.needed):
                continue
            known = (*scheme.needed, *scheme.extra)
            parts = {part: f"{stem}.{part}" for part in known if f"{stem}.{part}" in present}
            parts_of[f"{stem}.weight"] = parts
            taken |= set(parts.values())
    return parts_of | {name: {"": name} for name in present - taken}


def unpacked(scheme: Scheme, parts: Parts, name: str, path: Path) -> Tensor:
    """The matrix that these parts hold."""
    try:
        return scheme.unpack(parts)
    except (RuntimeError, ValueError, IndexError) as error:  # parts that do not fit each other
        reason = " ".join(str(error).split())[:200]
        raise CheckpointError(
            f"{path}: tensor {name} cannot be read ({reason}); the file is damaged, get it again"
        ) from None
