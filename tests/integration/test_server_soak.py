"""Minutes of traffic, and fuzzing from our own OpenAPI description. Run by `make test-slow`."""

import os
import random
import threading
import time
from collections import Counter

import httpx
import pytest

from foreword.server.errors import ApiError
from foreword.server.settings import ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import local_server
from helpers.serve_process import idle_health, serve
from helpers.served_cases import OVERRIDES
from helpers.waiting import wait_until

pytestmark = pytest.mark.slow

SOAK_SECONDS = float(os.environ.get("FOREWORD_SOAK_SECONDS", "300"))
STREAMS = 16
LEAVING = 0.3  # part of the clients that disconnect in the middle


def resident_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * 4096


class Client(threading.Thread):
    """Streams one answer after the other; sometimes leaves in the middle."""

    def __init__(self, url: str, number: int, until: float) -> None:
        super().__init__()
        self._url = url
        self._random = random.Random(number)
        self._until = until
        self.finished = self.left = 0
        self.faults: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=60, verify=False) as http:
            while time.monotonic() < self._until:
                try:
                    self._one(http)
                except httpx.HTTPError as error:
                    self.faults.append(repr(error))

    def _one(self, http: httpx.Client) -> None:
        leaves_after = self._random.randint(1, 60) if self._random.random() < LEAVING else None
        body = {
            "prompt": "the sky " * self._random.randint(1, 30),
            "max_tokens": self._random.randint(40 if leaves_after else 1, 120),
            "temperature": self._random.choice((0, 1)),
            "n": self._random.choice((1, 1, 1, 2)),
            "ignore_eos": True,
            "speculation": self._random.choice(OVERRIDES),
            "stream": True,
        }
        with http.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                self.faults.append(f"{answer.status_code} {answer.read()!r}")
                return
            text = ""
            for number, line in enumerate(answer.iter_lines()):
                text += line + "\n"
                if number == leaves_after:
                    self.left += 1
                    return
        self.finished += 1
        if "[DONE]" not in text or '"error"' in text:
            self.faults.append(text[-300:])


@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_sixteen_streams_for_minutes_with_clients_that_leave(tiny_model):
    config = '{"method": "suffix", "num_speculative_tokens": 6, "max_stored_tokens": 10000}'
    with serve(tiny_model, "--speculative-config", config, factory=None) as server:
        until = time.monotonic() + SOAK_SECONDS
        clients = [Client(server.url, number, until) for number in range(STREAMS)]
        for client in clients:
            client.start()
        pids = [server.process.pid, server.engine_pid() or 0]
        time.sleep(SOAK_SECONDS / 3)  # caches and pools have their size by then
        early = [resident_bytes(pid) for pid in pids]
        for client in clients:
            client.join()
        late = [resident_bytes(pid) for pid in pids]
        finished, left = (sum(getattr(client, name) for client in clients) for name in ("finished", "left"))
        print(f"{finished} answers, {left} left; MiB {[m >> 20 for m in early]} -> {[m >> 20 for m in late]}")
        assert [fault for client in clients for fault in client.faults] == []
        assert finished > 100
        assert left > 30
        for before, after in zip(early, late, strict=True):
            assert after < before + 16 * 1024 * 1024
        with server.http() as http:
            health = idle_health(http)  # no answer runs or waits, and no page of KV is held
            assert health["engine_restarts"] == 0
            page = http.get("/metrics").text
        assert 'foreword:kv_cache_pages_used{model_name="' in page
        assert "foreword:engine_step_faults_total{" not in page
        assert server.terminate() == 0


def test_requests_made_from_the_description_never_break_the_server(tiny_model):
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    with local_server(
        tiny_model, ServerSettings("tiny"), FakeEngine(step_seconds=0.0005, capacity=64)
    ) as server:
        schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

        statuses: Counter[int] = Counter()

        @given(case=schema.as_strategy())
        @settings(
            max_examples=1500,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        def ask(case: "schemathesis.Case") -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)  # any other than ours is a 404 and tests nothing more
            answer = case.call(timeout=60)
            statuses[answer.status_code] += 1
            is_late = answer.status_code == 504 and "deadline_exceeded" in answer.text
            assert answer.status_code < 500 or is_late, (answer.status_code, answer.text)
            if answer.status_code >= 400:
                error = answer.json()["error"]
                expected = ApiError(answer.status_code, "").body(answer.request.path_url)["error"]
                assert isinstance(error, str) or set(error) == set(expected)
                assert type(error) is type(expected)

        ask()
        assert statuses[200] > 50, statuses
        wait_until(lambda: not server.context.admission.in_flight)  # a stream counts a little longer
        with server.http() as http:
            assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
