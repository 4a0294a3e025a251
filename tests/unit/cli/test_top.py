from dataclasses import replace

import pytest
from rich.console import Console

from foreword.cli import watch
from foreword.cli.server_client import ServerRefusal
from foreword.cli.watch import COLUMNS, report_view
from foreword.control.reporting.figures import ControlReport, PairReport
from foreword.engine.learning import LearningReport
from helpers.learning_reports import TRAINED

REPORT = ControlReport(pairs=(PairReport("eagle3+ngram", "chat/greedy", asks=60),))


def printed(learning: LearningReport | None = None, width: int = 80) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(report_view(REPORT, learning))
    return capture.get()


def test_every_column_of_figures_is_explained_below_the_table():
    lines = printed().splitlines()
    for name, meaning in COLUMNS.items():
        assert any(line.startswith(name) and meaning in line for line in lines), name
    assert all(len(line) <= 80 for line in lines)


def test_a_head_in_training_has_a_line():
    assert "learning" not in printed()
    (line,) = (one for one in printed(TRAINED, 200).splitlines() if one.startswith("learning"))
    assert line.rstrip() == (
        "learning: rolling out; 1,500 of 20,000 new tokens; 12 texts kept; version 1 in use, "
        "tokens per pass on held-out texts 1.50 -> 1.80"
    )
    failed = replace(TRAINED, state="failed", reason="cannot write [/dev/shm/x]", version=None)
    assert "learning: failed (cannot write [/dev/shm/x]); " in printed(failed, 200)
    assert "initial head in use" in printed(failed, 200)


@pytest.mark.parametrize(("status", "is_shown"), [(404, True), (401, False), (503, False)])
def test_only_a_server_without_training_is_shown_without_it(monkeypatch, status, is_shown):
    def refuse(url: str, api_key: str | None) -> LearningReport:
        raise ServerRefusal("refused", status)

    monkeypatch.setattr(watch, "fetch_learning", refuse)
    if is_shown:
        assert watch._fetch_learning("http://x", None) is None
        return
    with pytest.raises(ServerRefusal, match="refused"):
        watch._fetch_learning("http://x", None)
