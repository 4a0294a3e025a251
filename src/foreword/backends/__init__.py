"""Backends that run a model, with one common interface."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from foreword.kernels.placement import Placement, register_placement

if TYPE_CHECKING:
    from torch import Tensor


def _draw_rows(*arguments: Any, **options: Any) -> "Tensor":  # noqa: ANN401 - those of the kernel
    from foreword.kernels.triton_draw import draw_rows  # imports Triton

    return draw_rows(*arguments, **options)


# Acceptance and drafters sample on a GPU without copying logits to the host.
register_placement("cuda", Placement(draw_rows=None if find_spec("triton") is None else _draw_rows))
