"""The alerts ask only for metrics that the server has."""

import re
from pathlib import Path

import yaml

from foreword.server.metrics import Metrics

FOLDER = Path(__file__).parents[3] / "deploy" / "grafana"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}


def rules() -> list[dict[str, str]]:
    value = yaml.safe_load((FOLDER / "alerts.yml").read_text(encoding="utf-8"))
    return [rule for group in value["groups"] for rule in group["rules"]]


def test_every_alert_names_metrics_that_exist():
    families = Metrics("m").registry.collect()
    known = {family.name + suffix for family in families for suffix in SUFFIXES[family.type]}
    assert len(rules()) == 8
    for rule in rules():
        named = set(re.findall(r"foreword:\w+", rule["expr"]))
        assert named, rule["alert"]
        assert named <= known, rule["alert"]
        assert rule["annotations"]["summary"]


def test_prometheus_loads_them():
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    assert [Path(path).name for path in config["rule_files"]] == ["alerts.yml"]
    compose = (FOLDER / "docker-compose.yml").read_text(encoding="utf-8")
    assert "./alerts.yml:" in compose
