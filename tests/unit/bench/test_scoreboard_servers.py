"""Servers that a scoreboard starts, and result files that it keeps."""

import json
import sys
import urllib.request
from pathlib import Path

import pytest

from foreword.bench.served_engines import ServedEngine, prove_server, started
from foreword.cli.bench.scoreboard import Scoreboard
from foreword.errors import RequestError

# Listens at once, and refuses the first two completions.
SERVER = """
import http.server, json, sys
refusals = 2
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(200, {"served": self.server.served})
    def do_POST(self):
        self.server.served += 1
        self.answer(503 if self.server.served <= refusals else 200, {})
    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler)
server.served = 0
server.serve_forever()
"""


def test_a_server_is_used_once_it_completes_a_text():
    with (
        started(sys.executable, ["-c", SERVER], "m", 1) as url,
        urllib.request.urlopen(f"{url}/models") as listed,
    ):
        assert json.load(listed)["served"] == 3
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"{url}/models")


def test_a_server_that_does_not_start_is_part_of_the_result():
    broken = ServedEngine("vllm", "vLLM", ["-c", "raise ValueError('no GPU')"])
    found = prove_server(broken, sys.executable, Path("model"), 1, [])
    assert found == {"verdicts": [], "absent": ["the server did not start: ValueError: no GPU"]}


def test_a_result_that_is_there_is_not_measured_again(tmp_path: Path):
    board = Scoreboard(results=tmp_path, label="cpu")
    board._measure_once("a", {"title": "t"}, lambda: {"rows": [1]})
    board._measure_once("a", {"title": "t"}, lambda: {"rows": [2]})
    found = json.loads((tmp_path / "cpu-a.json").read_text(encoding="utf-8"))
    assert found["rows"] == [1]
    assert found["title"] == "t"
    assert found["made"]["date"]


def test_a_failed_measurement_leaves_no_file(tmp_path: Path):
    def fail() -> dict[str, object]:
        raise RequestError("out of memory")

    with pytest.raises(RequestError, match="out of memory"):
        Scoreboard(results=tmp_path, label="cpu")._measure_once("a", {}, fail)
    assert not list(tmp_path.iterdir())
