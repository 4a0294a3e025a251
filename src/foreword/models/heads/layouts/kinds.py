"""Which kind of head a file holds, told by its tensors: configs often say the wrong thing, or nothing."""

import re
from collections.abc import Callable

from foreword.models.heads.spec import Shapes

_MEDUSA = re.compile(r"^blocks\.\d+\.layers\.\d+\.weight$")
_MTP = re.compile(r"(^|\.)(enorm|pre_fc_norm_hidden|eh_proj|input_proj)\.weight$")


def _any(pattern: re.Pattern[str]) -> Callable[[Shapes], bool]:
    return lambda shapes: any(pattern.search(name) for name in shapes)


def _has(name: str) -> Callable[[Shapes], bool]:
    return lambda shapes: name in shapes


def _reads_both(shapes: Shapes) -> bool:
    """Whether the first layer's attention reads embedding and features side by side."""
    query, output = (shapes.get(f"layers.0.self_attn.{name}_proj.weight", ()) for name in "qo")
    return len(query) == 2 and len(output) == 2 and query[1] == 2 * output[0]


def _fuses_both(shapes: Shapes) -> bool:
    matrix = shapes.get("fc.weight", ())
    return len(matrix) == 2 and matrix[1] == 2 * matrix[0]


_KINDS: tuple[tuple[str, Callable[[Shapes], bool]], ...] = (
    ("dspark", _has("markov_head.markov_w1.weight")),
    ("p_eagle", _has("mask_hidden")),
    ("dflash", _has("hidden_norm.weight")),
    ("mtp", _any(_MTP)),
    ("eagle3", _reads_both),
    ("eagle", _fuses_both),
    ("medusa", _any(_MEDUSA)),
    ("mlp_speculator", _has("emb.0.weight")),
)


def head_kind(shapes: Shapes) -> str | None:
    """The method that runs such a head; None: it is not a head that we know."""
    return next((kind for kind, holds in _KINDS if holds(shapes)), None)
