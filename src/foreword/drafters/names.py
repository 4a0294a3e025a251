"""The names of drafters, without what they are made of: to know them nothing heavy is imported."""

from importlib.metadata import entry_points

ENTRY_POINTS = "foreword.drafters"
"""Group of entry points under which another package offers a `DrafterKind`; the entry's name is the method."""

OWN_METHODS = (
    "ngram",
    "prediction",
    "suffix",
    "rest",
    "jacobi",
    "lookahead",
    "draft_model",
    "self_quantized",
    "layer_skip",
    "eagle",
    "eagle3",
)


def method_names() -> list[str]:
    """Ours, and those that other packages add."""
    return list(dict.fromkeys((*OWN_METHODS, *(entry.name for entry in entry_points(group=ENTRY_POINTS)))))
