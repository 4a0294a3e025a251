"""The documentation site: every page is in its menu, benchmarks say what made them, links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def hooks():
    spec = importlib.util.spec_from_file_location("site_hooks", DOCS / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_menu():
    menu = re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(menu) == sorted(path.name for path in DOCS.glob("*.md"))


def test_links_between_pages_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (DOCS / target).exists(), f"{page.name}: {target}"


def test_benchmarks_say_what_made_them():
    for path in (DOCS / "benchmarks").glob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        assert set(found["made"]) >= {"command", "date", "machine"}, path
        assert found["rows"], path


def test_tables_are_made_of_json(hooks, tmp_path):
    rows = [{"label": "a b", "ratio": {"low": 1.0, "middle": 1.5, "high": 2.0}, "same": None}]
    made = {"command": "foreword bench x", "date": "2026-01-02", "machine": "some"}
    (tmp_path / "one-thing.json").write_text(json.dumps({"rows": rows, "made": made}), encoding="utf-8")
    found = hooks.benchmark_tables(tmp_path)
    assert "## one thing" in found
    assert "`foreword bench x`, 2026-01-02, some" in found
    assert "| a b | 1.50 (1.00 to 2.00) |  |" in found
    assert "![" not in found
    (tmp_path / "one-thing.png").touch()
    assert hooks.benchmark_tables(tmp_path).endswith("![one-thing](benchmarks/one-thing.png)")


def test_links_into_the_source_become_text(hooks):
    assert (
        hooks.on_page_markdown("see [step.py](../src/step.py) and [a](b.md)") == "see step.py and [a](b.md)"
    )
