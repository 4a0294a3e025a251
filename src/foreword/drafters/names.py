"""Registry of drafters by name, without importing them."""

from collections.abc import Mapping
from importlib.metadata import entry_points

ENTRY_POINTS = "foreword.drafters"
"""Entry-point group for `DrafterKind` objects of other packages; the entry's name is the method."""

OWN_METHODS = {
    "ngram": "foreword.drafters.lookup.ngram:KIND",
    "prediction": "foreword.drafters.lookup.prediction:KIND",
    "grammar": "foreword.drafters.lookup.grammar:KIND",
    "suffix": "foreword.drafters.lookup.suffix:KIND",
    "rest": "foreword.drafters.lookup.rest:KIND",
    "jacobi": "foreword.drafters.lookup.jacobi:KIND",
    "lookahead": "foreword.drafters.lookup.lookahead:KIND",
    "remote": "foreword.drafters.remote:KIND",
    "draft_model": "foreword.drafters.model.autoregressive:DRAFT_MODEL",
    "self_quantized": "foreword.drafters.model.self_quantized:KIND",
    "sparse_kv": "foreword.drafters.model.sparse_kv:KIND",
    "layer_skip": "foreword.drafters.model.layer_skip:KIND",
    "eagle": "foreword.drafters.heads.eagle:EAGLE",
    "eagle3": "foreword.drafters.heads.eagle:EAGLE3",
    "p_eagle": "foreword.drafters.heads.eagle:P_EAGLE",
    "medusa": "foreword.drafters.heads.medusa:KIND",
    "mtp": "foreword.drafters.heads.eagle:MTP",
    "dflash": "foreword.drafters.heads.dflash:DFLASH",
    "dflash2": "foreword.drafters.heads.dflash:DFLASH2",
    "dspark": "foreword.drafters.heads.dflash:DSPARK",
}
"""Method -> location of its `DrafterKind`, in entry-point syntax. A new drafter is one file and one line here."""


def method_names() -> list[str]:
    """Return the built-in drafters, then those of other packages."""
    return list(dict.fromkeys((*OWN_METHODS, *(entry.name for entry in entry_points(group=ENTRY_POINTS)))))


def named_methods(text: str) -> Mapping[str, str | list[str]]:
    """Return the configuration that a text such as `ngram` or `suffix+ngram` stands for."""
    names = list(split_methods(text))
    return {"method": names if len(names) > 1 else names[0]}


def split_methods(method: object) -> tuple[str, ...]:
    """Return the drafters named by `"ngram"`, `"eagle3+ngram"` or a list; empty for any other value."""
    if isinstance(method, str):
        return tuple(name.strip() for name in method.split("+"))
    names = method if isinstance(method, list | tuple) else ()
    return tuple(names) if all(isinstance(name, str) for name in names) else ()
