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
    """Return the configuration that `ngram`, or `suffix+ngram`, is short for."""
    names = list(split_methods(text))
    return {"method": names if len(names) > 1 else names[0]}


def split_methods(method: object) -> tuple[str, ...]:
    """Return the drafters named by `"ngram"`, `"eagle3+ngram"` or a list; empty for any other value."""
    if isinstance(method, str):
        return tuple(name.strip() for name in method.split("+"))
    listed = method if isinstance(method, list | tuple) else []
    return tuple(listed) if all(isinstance(name, str) for name in listed) else ()
