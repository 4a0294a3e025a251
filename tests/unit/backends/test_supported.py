"""The table of supported models is made from the code, and docs/models.md has the same."""

from pathlib import Path

from foreword.backends.support import BACKENDS, supported_families
from foreword.models.architectures.registry import ARCHITECTURES

DOCS = Path(__file__).resolve().parents[3] / "docs" / "models.md"


def test_every_family_has_a_row_and_every_backend_runs_all():
    rows = supported_families()
    assert [row.hf_class for row in rows] == [family.hf_class for family in ARCHITECTURES]
    assert all(row.backends == dict.fromkeys(BACKENDS, "yes") for row in rows)


def test_the_docs_have_the_same_table():
    text = DOCS.read_text(encoding="utf-8")
    between = text.partition("<!-- supported -->\n")[2].partition("\n<!-- /supported -->")[0]
    headings = ("models", "class in config.json", "files", *BACKENDS)
    lines = [headings, ("---",) * len(headings)]
    for row in supported_families():
        lines.append((row.models, f"`{row.hf_class}`", row.formats, *row.backends.values()))
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    assert between == table, f"put this into docs/models.md:\n{table}"
