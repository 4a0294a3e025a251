"""Progress of long commands where nobody sees a bar."""

import io

import pytest
from rich.console import Console

from foreword.cli import console


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
