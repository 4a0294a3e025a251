"""Two hundred hostile structured outputs against a server: others are answered, memory comes back, nothing dies."""

import json
import os
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from foreword.models.sources.builtin import DEFAULT_MODEL
from helpers.hostile_forms import corpus
from helpers.serve_process import ServeProcess, serve
from helpers.waiting import PATIENCE, wait_until

HOSTILE_CLIENTS = 4

MEMORY = 50 << 20
"""Bytes that the engine may have more when all is over."""

WAIT = 0.25
"""Seconds that another client may wait for its next token; where the machine is slower than that without the hostile
requests, twice as long as then."""


def memory_of(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class OtherClient(threading.Thread):
    """Asks for answers in turn, plain and with a schema, and measures how long it waits for every piece."""

    def __init__(self, server: ServeProcess) -> None:
        super().__init__(daemon=True)
        self._server = server
        self.gaps: list[float] = []
        self.is_done = threading.Event()
        self.failures: list[str] = []

    def run(self) -> None:
        person = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}}
        forms = (
            {},
            {"structured_outputs": {"json": person}},
            {"structured_outputs": {"choice": ["yes", "no"]}},
        )
        with self._server.http() as http:
            turn = 0
            while not self.is_done.is_set():
                turn += 1
                body = {"prompt": "Once upon a time", "max_tokens": 24, "stream": True, "speculation": False}
                last = time.perf_counter()
                with http.stream("POST", "/v1/completions", json=body | forms[turn % 3]) as answer:
                    if answer.status_code != 200:
                        self.failures.append(str(answer.status_code))
                    for line in answer.iter_lines():
                        if line:
                            now = time.perf_counter()
                            self.gaps.append(now - last)
                            last = now


def fill_pages(server: ServeProcess) -> None:
    """Write to every KV page, or pages used for the first time would count as memory of grammars."""
    with server.http() as http:
        for number in range(12):
            body = {"prompt": f"{number} " * 200, "max_tokens": 1}
            assert http.post("/v1/completions", json=body).status_code == 200


def measured(server: ServeProcess, work) -> list[float]:
    client = OtherClient(server)
    client.start()
    work()
    client.is_done.set()
    client.join()
    assert not client.failures
    return client.gaps


@pytest.mark.slow
@pytest.mark.model
def test_a_hostile_corpus_costs_others_little_and_the_engine_no_memory():
    statuses: Counter[int] = Counter()
    longest: list[tuple[float, str]] = []

    def attack(case: tuple[str, dict]) -> None:
        name, form = case
        began = time.perf_counter()
        with server.http() as http:
            http.timeout = httpx.Timeout(PATIENCE * 5)  # how long it waits itself is of no interest
            body = {"prompt": "Write: ", "max_tokens": 40, "temperature": 1.0, "seed": 1} | form
            statuses[http.post("/v1/completions", json=body).status_code] += 1
        longest.append((time.perf_counter() - began, name[:60]))

    def attacks() -> None:
        with ThreadPoolExecutor(HOSTILE_CLIENTS) as clients:
            list(clients.map(attack, corpus()))

    with serve(DEFAULT_MODEL, "--kv-cache-memory-bytes", "64M", factory=None) as server:
        fill_pages(server)
        measured(server, lambda: time.sleep(10))  # everything is there that every request needs
        calm = measured(server, lambda: time.sleep(10))
        pid = server.engine_pid()
        assert pid is not None
        before = memory_of(pid)
        gaps = measured(server, attacks)
        with suppress(AssertionError):  # the figures are printed in any case
            wait_until(lambda: memory_of(pid) < before + MEMORY)
        after = memory_of(pid)
        assert server.engine_pid() == pid
        measured(server, lambda: time.sleep(2))
        assert server.terminate() == 0
    figures = {
        "statuses": dict(statuses),
        "memory_mb": [before >> 20, after >> 20],
        "calm_ms": [round(1000 * statistics.median(calm)), round(1000 * max(calm))],
        "hostile_ms": [round(1000 * statistics.median(gaps)), round(1000 * max(gaps))],
        "over_limit": sum(gap > WAIT for gap in gaps),
        "gaps": len(gaps),
        "longest": sorted(longest)[-5:],
    }
    print(json.dumps(figures))
    assert after < before + MEMORY
    assert set(statuses) <= {200, 400}
    assert sum(statuses.values()) == 200
    assert max(gaps) < max(WAIT, 2 * max(calm))
