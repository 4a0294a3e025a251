"""Progress of long commands where nobody sees a bar."""

import io

import pytest
from rich.console import Console

from foreword.cli import console
from helpers.clocks import ScriptedClock


@pytest.mark.parametrize("is_long", [True, False])
def test_only_what_is_long_tells_each_stage_once_in_a_file(is_long: bool, monkeypatch: pytest.MonkeyPatch):
    log = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=log, force_terminal=False, width=20))
    with console.stage_bar(is_long=is_long) as show:
        show("loading", 0, 0)
        show("coupled, temperature [0.7], code", 3, 40)
        show("coupled, temperature [0.7], code", 4, 40)
        show("laws", 0, 9)
    lines = ["loading", "coupled, temperature [0.7], code (3 of 40)", "laws (0 of 9)"]
    assert log.getvalue().splitlines() == (lines if is_long else [])


def test_a_slow_start_writes_percentages_and_a_quick_one_only_its_end():
    for seconds, expected in (
        (3.0, [f"loading: {tenth}0%" for tenth in range(1, 11)]),
        (0.001, ["loading: 100%"]),
    ):
        lines: list[str] = []
        clock = ScriptedClock()
        show = console.percent_lines(lines.append, clock)
        show("reading the header", 0, 0)
        for done in range(101):
            clock.pass_by(seconds / 10)
            show("loading", done, 100)
        assert lines == expected
        show("preparing passes", 7, 7)
        assert lines[-1] == "preparing passes: 100%"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_start_is_a_bar_on_a_terminal_and_lines_elsewhere(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
):
    log = io.StringIO()
    monkeypatch.setattr(console, "stderr", Console(file=log, force_terminal=is_terminal, width=20))
    with console.loading_bar() as show:
        show("loading", 1, 1)
    assert (log.getvalue() == "loading: 100%\n") is not is_terminal
