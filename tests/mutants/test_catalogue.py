"""The catalogue follows the code: a mutant that can no longer be put in would go unnoticed until `make mutants`."""

from pathlib import Path

from every import EVERY_MUTANT

ROOT = Path(__file__).resolve().parents[2]


def test_every_bug_can_be_put_in():
    texts = {mutant: (ROOT / "src" / "foreword" / mutant.file).read_text("utf-8") for mutant in EVERY_MUTANT}
    stale = [(m.bug, m.what) for m, text in texts.items() if text.count(m.old) != 1]
    assert not stale


def test_every_named_test_is_there():
    missing = []
    for name in {name for mutant in EVERY_MUTANT for name in mutant.tests}:
        file, *functions = name.split("::")
        path = ROOT / file
        last = functions[-1].split("[")[0] if functions else ""
        if not path.exists() or (last and path.is_file() and f"{last}(" not in path.read_text("utf-8")):
            missing.append(name)
    assert not missing
