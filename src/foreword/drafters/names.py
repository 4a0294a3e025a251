"""The names of drafters, without what they are made of: to know them nothing heavy is imported."""

from collections.abc import Mapping
from importlib.metadata import entry_points

ENTRY_POINTS = "foreword.drafters"
"""Group of entry points under which another package offers a `DrafterKind`; the entry's name is the method."""

OWN_METHODS = (
    "ngram",
    "prediction",
    "grammar",
    "suffix",
    "rest",
    "jacobi",
    "lookahead",
    "remote",
    "draft_model",
    "self_quantized",
    "layer_skip",
    "eagle",
    "eagle3",
    "p_eagle",
    "medusa",
    "mtp",
    "dflash",
    "dspark",
)


def method_names() -> list[str]:
    """Ours, and those that other packages add."""
    return list(dict.fromkeys((*OWN_METHODS, *(entry.name for entry in entry_points(group=ENTRY_POINTS)))))


def named_methods(text: str) -> Mapping[str, str | list[str]]:
    """The configuration that `ngram`, or `suffix+ngram`, is short for."""
    names = [name.strip() for name in text.split("+")]
    return {"method": names if len(names) > 1 else names[0]}
