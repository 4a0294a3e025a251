"""Reads safetensors with one-line errors, and reorders rotated pairs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from foreword.errors import CheckpointError
from foreword.models.config import AttentionSpec


@dataclass(frozen=True)
class RotatedRows:
    """Rows of heads whose last dimensions are rotated pairs."""

    rows: int  # total
    head: int  # per head
    rotated: int  # rotated rows at the end of a head

    def order(self) -> NDArray[np.intp]:
        """Return the stored row of each row."""
        one = np.arange(self.head)
        one[-self.rotated :] = one[-self.rotated :].reshape(-1, 2).T.reshape(-1)
        first = np.arange(0, self.rows, self.head)
        return (first[:, None] + one).reshape(-1)


def rotated_rows(attention: AttentionSpec) -> dict[str, RotatedRows]:
    """Return by name in a layer: queries and keys, or the rotated parts of latent attention."""
    latent = attention.latent
    if latent is None:
        found = {
            "q_proj": RotatedRows(attention.query_width, attention.head_dim, attention.head_dim),
            "k_proj": RotatedRows(attention.kv_width, attention.head_dim, attention.head_dim),
        }
    else:
        heads = RotatedRows(attention.query_width, attention.head_dim, latent.rope_dim)
        shared = RotatedRows(latent.row_dim, latent.row_dim, latent.rope_dim)
        found = {"q_proj": heads, "q_b_proj": heads, "kv_a_proj_with_mqa": shared}
    return {
        f"self_attn.{name}.{kind}": turned for name, turned in found.items() for kind in ("weight", "bias")
    }


@contextmanager
def opened_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file} is not a whole safetensors file ({reason}); get it again") from None
