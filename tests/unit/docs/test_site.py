"""The documentation site: every page is in its menu, benchmarks say what made them, links lead somewhere."""

import importlib.util
import itertools
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


def files_named_in(markdown: str) -> set[str]:
    """Return the paths of source files in code spans; files that a reader is asked to write are left out."""
    named = set(re.findall(r"`((?:[\w.-]+/)+[\w-]+\.(?:py|cpp|h|sh))`", markdown))
    return {path for path in named if not path.endswith("/echo.py")}


def test_source_files_named_in_pages_exist():
    missing = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        for path in files_named_in(page.read_text(encoding="utf-8")):
            if not any((base / path).exists() for base in (ROOT, ROOT / "src" / "foreword")):
                missing.append(f"{page.name}: {path}")
    assert missing == []


def test_files_in_code_spans_are_found():
    text = (
        "`kv/gone.py`, `tests/x-y/z.sh`, `drafters/lookup/echo.py`, `name.py`, kv/plain.py, `native/types.h`"
    )
    assert files_named_in(text) == {"kv/gone.py", "tests/x-y/z.sh", "native/types.h"}


def anchors(markdown: str, spaces: str) -> set[str]:
    """Return the anchors of a page's headings; what matches `spaces` becomes one hyphen, equal anchors get a number."""
    found: set[str] = set()
    text = re.sub(r"^```.*?^```", "", markdown, flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.+?) *$", text, flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        plain = re.sub(spaces, "-", re.sub(r"[^\w\- ]", "", words))
        numbered = (f"{plain}-{number}" for number in itertools.count(1))
        found.add(next(place for place in itertools.chain([plain], numbered) if place not in found))
    return found


GITHUB, SITE = " ", "[ -]+"


def test_anchors_of_headings():
    page = "# A `b` c, d\n\n```console\n# no heading\n```\n## Twice\n## Twice\n### [Link](x.md) here\n"
    assert anchors(page, SITE) == {"a-b-c-d", "twice", "twice-1", "link-here"}
    assert (anchors("# a / b", GITHUB), anchors("# a / b", SITE)) == ({"a--b"}, {"a-b"})


def test_anchors_in_links_lead_to_a_heading():
    missing = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
            linked = (page.parent / target) if target else page
            text = linked.read_text(encoding="utf-8") if linked.suffix == ".md" else ""
            if text and anchor not in anchors(text, GITHUB) & anchors(text, SITE):
                missing.append(f"{page.name}: {target}#{anchor}")
    assert missing == []


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


def test_the_diagram_of_packages_is_that_of_the_imports():
    pytest.importorskip("grimp")
    spec = importlib.util.spec_from_file_location("package_diagram", ROOT / "scripts" / "package_diagram.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    assert module.diagram() in page, "put what scripts/package_diagram.py prints into docs/design.md"
