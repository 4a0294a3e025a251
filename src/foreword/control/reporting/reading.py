"""Converts reports to and from JSON, for tools that query a server."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TypeVar

from foreword.control.reporting.figures import Band, Bounds, ControlReport, DecisionReport, PairReport, Usage
from foreword.errors import RequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    DataClass = TypeVar("DataClass", bound=DataclassInstance)


def as_json(report: ControlReport) -> dict[str, Any]:
    """Return the report as a JSON object, with derived figures such as utilisation and cost."""
    usage = report.usage
    derived = {
        "device_seconds": usage.device_seconds,
        "draft_utilisation": usage.draft_utilisation,
        "target_utilisation": usage.target_utilisation,
        "cost_per_million_busy": usage.cost_per_million(),
        "cost_per_million_reserved": usage.cost_per_million(reserved=True),
    }
    result = asdict(report)
    result["usage"] |= derived
    for pair, pair_json in zip(report.pairs, result["pairs"], strict=True):
        pair_json["tokens_per_draft"] = pair.tokens_per_draft
    return result


def from_json(value: object) -> ControlReport:
    """Restore a report from JSON; keys that this version does not know are ignored."""
    try:
        given = known_fields(ControlReport, value)
        given["pairs"] = tuple(_pair(pair) for pair in given.get("pairs", ()))
        given["usage"] = Usage(**known_fields(Usage, given.get("usage", {})))
        return ControlReport(**given)
    except (TypeError, AttributeError, ValueError, KeyError):
        raise RequestError(
            "the answer is no report on speculation; is the server of the same version?"
        ) from None


def _pair(value: object) -> PairReport:
    given = known_fields(PairReport, value)
    for name in ("predicted", "measured"):
        if given.get(name) is not None:
            given[name] = Bounds(**known_fields(Bounds, given[name]))
    bands, decisions = given.get("acceptance_by_position", ()), given.get("decisions", ())
    given["acceptance_by_position"] = tuple(Band(**known_fields(Band, band)) for band in bands)
    given["decisions"] = tuple(DecisionReport(**known_fields(DecisionReport, one)) for one in decisions)
    for name in ("depths", "acceptance_by_level"):
        given[name] = tuple(given.get(name, ()))
    return PairReport(**given)


def known_fields(data_class: "type[DataClass]", value: object) -> dict[str, Any]:
    """Return the keys of a JSON object that are fields of the data class."""
    if not isinstance(value, Mapping):
        raise TypeError("not a JSON object")
    return {field.name: value[field.name] for field in fields(data_class) if field.name in value}
