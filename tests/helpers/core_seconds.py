"""`pytest --core-seconds FILE`: what every test file takes of a core, its child processes included."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest


class CoreSeconds:
    """Counts in the processes that run tests, adds up in the one that hands them out."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last = 0.0
        self._ends_a_file = False
        self._by_test_file: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        self._last = self._last or _spent()  # what collecting took belongs to no file
        self._ends_a_file = nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> pytest.TestReport:
        report: pytest.TestReport = yield  # type: ignore[misc] - what a wrapper is given back
        if call.when == "teardown" and self._ends_a_file:  # reading all processes takes a millisecond
            before, self._last = self._last, _spent()
            report.core_seconds = self._last - before  # type: ignore[attr-defined] - travels with the report
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._by_test_file[report.location[0]] += getattr(report, "core_seconds", 0.0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            rounded = {name: round(seconds, 2) for name, seconds in self._by_test_file.most_common()}
            self._file.write_text(json.dumps({"total": round(sum(rounded.values())), **rounded}, indent=1))


def _spent(pid: str = "self") -> float:
    """Of a process, of its children that have ended, and of those that run."""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:15]
        children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    except OSError:
        return 0.0  # it has just ended
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK") + sum(map(_spent, children.split()))
