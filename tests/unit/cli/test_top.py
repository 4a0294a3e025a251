from rich.console import Console

from foreword.cli.watch import COLUMNS, report_view
from foreword.control.reporting.figures import ControlReport, PairReport


def test_every_column_of_figures_is_explained_below_the_table():
    console = Console(width=80)
    with console.capture() as printed:
        console.print(report_view(ControlReport(pairs=(PairReport("eagle3+ngram", "chat/greedy", asks=60),))))
    lines = printed.get().splitlines()
    for name, meaning in COLUMNS.items():
        assert any(line.startswith(name) and meaning in line for line in lines), name
    assert all(len(line) <= 80 for line in lines)
