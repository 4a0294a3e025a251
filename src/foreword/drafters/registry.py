"""The drafters that there are by name, ours and those that other packages add."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from enum import Enum, auto
from functools import cache
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from foreword.drafters.names import ENTRY_POINTS
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError
from foreword.speculation.drafting import Drafter


class Guesses(Enum):
    """Where a drafter's guesses come from under a rule that asks: what *traversal* has to know of its trees."""

    CHOSEN = auto()  # from the text alone: nothing is drawn
    DRAWN = auto()  # drawn, in trees whose shape is fixed before
    RANKED = auto()  # drawn, told with q, and ranked or left out by what was drawn


@dataclass(frozen=True)
class DrafterKind:
    """One way to draft: its settings and how it is made."""

    summary: str  # one line for listings
    settings: type  # a frozen dataclass; its fields are the keys that a user may set
    build: Callable[[Any, DrafterResources], Drafter]  # (settings, resources) -> drafter
    makes_trees: Callable[[Any], bool] = lambda settings: False  # whether its drafts may branch
    # Whether its calls need a thread with a time limit, which costs a quarter of a millisecond.
    can_hang: bool = True
    guesses: Guesses = Guesses.RANKED  # who does not say is judged by *coupled*, unless it makes chains
    defect: str = ""  # why it cannot be used; empty: it can

    def configure(self, values: Mapping[str, Any]) -> Any:  # noqa: ANN401 - of the type `settings`
        """The settings with these values; a value of the wrong kind is refused by name."""
        kinds = {field.name: field.type for field in fields(self.settings)}
        for field in fields(self.settings):
            if field.default is MISSING and field.name not in values:
                raise RequestError(f"speculation: this method needs {field.name!r} ({self.summary})")
        for name, value in values.items():
            expected = _TYPES.get(str(getattr(kinds[name], "__name__", kinds[name])))
            is_wrong = expected is not None and not isinstance(value, expected)
            if is_wrong or (isinstance(value, bool) and expected not in (None, bool)):
                raise RequestError(f"speculation: {name} must be {_NAMES[expected]}, not {value!r}")
        return self.settings(**values)


_TYPES: dict[str, Any] = {"int": int, "float": (int, float), "str": str, "bool": bool}
_NAMES: dict[Any, str] = {
    int: "a whole number",
    (int, float): "a number",
    str: "a string",
    bool: "true or false",
}


def _builtin_kinds() -> dict[str, DrafterKind]:
    from foreword.cluster.settings import RemoteConfig
    from foreword.drafters.heads.dflash import build_dflash
    from foreword.drafters.heads.dspark import DSparkConfig, build_dspark
    from foreword.drafters.heads.eagle import build_eagle
    from foreword.drafters.heads.eagle3 import build_eagle3
    from foreword.drafters.heads.loading import HeadConfig
    from foreword.drafters.heads.medusa import MedusaConfig, build_medusa
    from foreword.drafters.heads.mtp import MtpConfig, build_mtp
    from foreword.drafters.heads.p_eagle import build_p_eagle
    from foreword.drafters.lookup.grammar import GrammarConfig, GrammarDrafter
    from foreword.drafters.lookup.jacobi import JacobiConfig, JacobiDrafter
    from foreword.drafters.lookup.lookahead import LookaheadConfig, LookaheadDrafter
    from foreword.drafters.lookup.ngram import NgramConfig, NgramDrafter
    from foreword.drafters.lookup.prediction import PredictionConfig, PredictionDrafter
    from foreword.drafters.lookup.rest import RestConfig, build_rest
    from foreword.drafters.lookup.suffix import SuffixConfig, build_suffix_drafter
    from foreword.drafters.model.draft_model import DraftModelConfig, build_draft_model
    from foreword.drafters.model.layer_skip import LayerSkipConfig, build_layer_skip
    from foreword.drafters.model.self_quantized import SelfQuantizedConfig, build_self_quantized
    from foreword.drafters.remote import build_remote

    chosen = {
        "ngram": DrafterKind(
            "looks the last tokens up earlier in the text", NgramConfig, lambda s, _: NgramDrafter(s)
        ),
        "prediction": DrafterKind(
            "follows the answer that the request's user expects",
            PredictionConfig,
            lambda _, __: PredictionDrafter(),
        ),
        "grammar": DrafterKind(
            "follows the form that the answer must have, where it leaves no choice",
            GrammarConfig,
            lambda _, __: GrammarDrafter(),
        ),
        "suffix": DrafterKind(
            "continues suffixes seen in this text and in past answers",
            SuffixConfig,
            build_suffix_drafter,
            lambda settings: True,
        ),
        "rest": DrafterKind(
            "continues as the texts of a datastore do", RestConfig, build_rest, lambda settings: True
        ),
        "jacobi": DrafterKind(
            "repeats what the target drew for the places ahead", JacobiConfig, lambda _, __: JacobiDrafter()
        ),
        "lookahead": DrafterKind(
            "n-grams that the target itself makes in a window beside the guesses",
            LookaheadConfig,
            lambda settings, _: LookaheadDrafter(settings),
            lambda settings: True,
        ),
        # Its guesses come without q, whoever drew them: chosen. It makes trees only for rules that take them.
        "remote": DrafterKind("draft nodes, on this machine or others", RemoteConfig, build_remote),
    }
    drawn = {
        "draft_model": DrafterKind(
            "a smaller model with the same tokenizer", DraftModelConfig, build_draft_model, _is_wide
        ),
        "self_quantized": DrafterKind(
            "the target's own weights in fewer bits", SelfQuantizedConfig, build_self_quantized, _is_wide
        ),
        "layer_skip": DrafterKind(
            "the target without some of its layers", LayerSkipConfig, build_layer_skip, _is_wide
        ),
        "eagle": DrafterKind(
            "an EAGLE-1 or EAGLE-2 head on the target's last hidden states",
            HeadConfig,
            build_eagle,
            _is_wide,
        ),
        "eagle3": DrafterKind(
            "an EAGLE-3 head on the target's hidden states", HeadConfig, build_eagle3, _is_wide
        ),
        "p_eagle": DrafterKind(
            "an EAGLE-3 head that guesses many tokens in one pass", HeadConfig, build_p_eagle, _is_wide
        ),
        "medusa": DrafterKind(
            "heads that each guess one place ahead from the last hidden state",
            MedusaConfig,
            build_medusa,
            lambda settings: settings.makes_trees,
        ),
        "mtp": DrafterKind("the MTP module in the target's own checkpoint", MtpConfig, build_mtp, _is_wide),
        "dflash": DrafterKind(
            "a head that fills a block of masks in one pass", HeadConfig, build_dflash, _is_wide
        ),
        "dspark": DrafterKind(
            "a DFlash head with a Markov head over the tokens of a block",
            DSparkConfig,
            build_dspark,
            _is_wide,
        ),
    }
    return {
        name: replace(kind, can_hang=False, guesses=guesses)
        for guesses, kinds in ((Guesses.CHOSEN, chosen), (Guesses.DRAWN, drawn))
        for name, kind in kinds.items()
    }


def _is_wide(settings: Any) -> bool:  # noqa: ANN401 - settings of a model-based drafter
    return bool(settings.tree_width > 1)


@cache
def drafter_kinds() -> Mapping[str, DrafterKind]:
    """All kinds by method name. Another package cannot take the name of one of ours.

    Installed packages are looked through once: that takes longer than a step, and every request may ask.
    """
    kinds = _builtin_kinds()
    for entry in entry_points(group=ENTRY_POINTS):
        if entry.name not in kinds:
            kinds[entry.name] = _load(entry)
    return MappingProxyType(kinds)


def _load(entry: Any) -> DrafterKind:  # noqa: ANN401 - importlib's EntryPoint
    """Another package's kind; one that cannot be loaded is refused when it is asked for, and bothers nobody else."""
    try:
        kind = entry.load()
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return _broken(f"drafter {entry.name!r} of {entry.value} cannot be loaded: {reason}")
    if not isinstance(kind, DrafterKind):
        return _broken(f"drafter {entry.name!r}: {entry.value} is not a DrafterKind")
    return kind


@dataclass(frozen=True)
class _NoSettings:
    """Of a kind that cannot be used anyway."""


def _broken(reason: str) -> DrafterKind:
    def refuse(*_: object) -> Any:  # noqa: ANN401 - it never returns
        raise RequestError(reason)

    return DrafterKind("cannot be loaded", _NoSettings, refuse, defect=reason)
