"""The dashboard asks only for metrics and labels that the server has."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from foreword.control.reporting.figures import ControlReport, PairReport
from foreword.engine.messages import EngineStats, RequestStats
from foreword.server.metrics import Metrics

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def expressions() -> list[str]:
    queries = [variable["query"] for variable in DASHBOARD["templating"]["list"]]
    return queries + [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def exported() -> set[str]:
    """Names as Prometheus sees them, also of metrics that have no value yet."""
    families = Metrics("m").registry.collect()
    return {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}


def named(expression: str) -> set[str]:
    return set(re.findall(r"foreword:\w+", expression))


def test_every_metric_it_names_exists():
    known = exported()
    for expression in expressions():
        assert named(expression), f"no metric in {expression}"
        assert named(expression) <= known, expression


def test_a_metric_that_does_not_exist_would_be_noticed():
    assert not named("rate(foreword:generation_tokens[1m])") <= exported()  # _total is part of the name
    assert not named("foreword:engine_ready_total") <= exported()


def test_every_label_it_groups_by_exists():
    metrics = Metrics("m")
    stats = RequestStats(
        output_tokens=3,
        drafts=1,
        drafted_per_position=(1,),
        accepted_per_position=(1,),
        rejected_per_position=(1,),
        method="x",
        cohort="x/greedy",
    )
    metrics.note_answer(stats, "stop")
    metrics.note_costs(0, stats)
    control = ControlReport(pairs=(PairReport("x", "x/greedy"),))
    metrics.note_engine(
        EngineStats(drafter_faults={"x/timeout": 1}, step_faults={"draft": 1}, control=control), 0
    )
    metrics.note_refusal(400)
    metrics.inc("request_success", 1, "stop")
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            groups = re.findall(r"by \(([^)]*)\) \((?:rate|increase)\((foreword:\w+)", target["expr"])
            for names, metric in groups:
                assert set(names.split(", ")) <= labels.get(metric, {"le"}), (panel["title"], names)


@pytest.mark.parametrize("expression", expressions())
def test_brackets_match(expression):
    depth = 0
    for sign in expression:
        depth += (sign in "([{") - (sign in ")]}")
        assert depth >= 0
    assert depth == 0


def test_panels_do_not_overlap():
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


def test_the_compose_example_mounts_what_is_there():
    compose = yaml.safe_load((FOLDER / "docker-compose.yml").read_text(encoding="utf-8"))
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).exists(), volume
    source = yaml.safe_load((FOLDER / "provisioning/datasources/prometheus.yml").read_text(encoding="utf-8"))
    uids = {entry["uid"] for entry in source["datasources"]}
    assert {panel["datasource"]["uid"] for panel in DASHBOARD["panels"]} <= uids
