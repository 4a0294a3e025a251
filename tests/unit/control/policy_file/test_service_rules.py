"""Classes of service in the policy file."""

from typing import Any

import pytest

from foreword.control.policy_file.explaining import explain
from foreword.control.policy_file.matching import RequestTraits
from foreword.control.policy_file.parsing import parse_policy
from foreword.control.service import Service, Slo
from foreword.errors import RequestError

SERVICE = {
    "classes": {
        "chat": {"slo": "latency", "tpot_ms": 50, "match": {"stream": True}},
        "nightly": {"slo": "batch", "match": {"metadata.job": "*"}},
    },
    "shares": {"gold*": 3, "*": 0.5},
    "ageing_seconds": 12,
}


def policy(service: Any) -> Any:
    return parse_policy({"version": 1, "service": service})


def test_the_first_class_that_fits_counts_and_tenants_have_weights():
    rules = policy(SERVICE).service
    assert rules.of(RequestTraits(tenant="golden", stream=True)) == Service(
        "chat", Slo.LATENCY, 0.05, 12, 3.0
    )
    assert rules.of(RequestTraits(metadata={"job": "a"})) == Service("nightly", Slo.BATCH, None, 12, 0.5)
    assert rules.of(RequestTraits()) == Service("throughput", Slo.THROUGHPUT, None, 12, 0.5)
    assert policy({}).service.of(RequestTraits()) == Service()


def test_the_bound_of_a_class_is_one_of_guesses_too_and_is_explained():
    found = policy(SERVICE)
    assert found.step_limit(RequestTraits(stream=True)) == 0.05
    assert found.step_limit(RequestTraits()) is None
    told = explain(found, RequestTraits(tenant="gold", stream=True))
    assert (told.service, told.weight, told.step_limit_ms) == ("chat", 3.0, 50)


@pytest.mark.parametrize(
    ("service", "complaint"),
    [
        ({"classes": {"a": {}}}, r"service\.classes\.a\.slo is missing: one of latency, throughput, batch"),
        ({"classes": {"a": {"slo": "fast"}}}, "must be one of latency, throughput, batch, not 'fast'"),
        ({"classes": {"a": {"slo": "latency"}}}, r"tpot_ms must be a positive number of milliseconds"),
        ({"classes": {"a": {"slo": "batch", "tpot_ms": 5}}}, "for slo latency, and for no other"),
        ({"classes": {"a": {"slo": "batch", "color": 5}}}, "unknown key 'color'"),
        ({"shares": {"a": 0}}, r"service\.shares\.a must be a positive number, not 0"),
        ({"shares": {"a": True}}, "must be a positive number, not True"),
        ({"ageing_seconds": -1}, "ageing_seconds must be a number of at least 0"),
        ({"weights": {}}, "unknown key 'weights'; known are classes, shares, ageing_seconds"),
    ],
)
def test_what_is_wrong_is_refused_by_its_place(service: Any, complaint: str):
    with pytest.raises(RequestError, match=complaint):
        policy(service)
