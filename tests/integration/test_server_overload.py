"""Beyond its capacity the server refuses properly, and what it refuses costs the engine nothing."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from foreword.server.settings import Limits, ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import LocalServer, local_server
from helpers.waiting import wait_until

CAPACITY = 4
TOKENS = 8


class Clients:
    """Closed-loop load until so many answers were given."""

    def __init__(self, server: LocalServer, count: int, answers: int) -> None:
        self._server = server
        self._answers = answers
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(count)
        self.statuses = Counter[int]()
        self._running = [self._pool.submit(self._client, number) for number in range(count)]

    def wait(self) -> Counter[int]:
        for client in self._running:
            client.result()
        self._pool.shutdown()
        return self.statuses

    def _client(self, number: int) -> None:
        with self._server.http() as http:
            while self.statuses[200] < self._answers:
                body = {"prompt": [5, 6, number + 7], "max_tokens": TOKENS, "speculation": False}
                answer = http.post("/v1/completions", json=body)
                with self._lock:
                    self.statuses[answer.status_code] += 1
                if answer.status_code == 429:
                    assert 1 <= int(answer.headers["retry-after"]) <= 60
                    assert answer.json()["error"]["code"] == "queue_full"
                    assert answer.json()["error"]["type"] == "rate_limit_error"


@pytest.fixture
def server(tiny_model):
    limits = Limits(running=CAPACITY, queued=CAPACITY)
    engine = FakeEngine(capacity=CAPACITY)
    with local_server(tiny_model, ServerSettings("tiny", limits=limits), engine) as running:
        yield running


def test_as_many_as_there_are_places_are_all_answered(server):
    assert set(Clients(server, 2 * CAPACITY, 40).wait()) == {200}
    assert server.context.admission.in_flight == 0


def test_what_is_refused_costs_the_engine_nothing(server):
    server.engine.is_held = True
    clients = Clients(server, 8 * CAPACITY, 40)
    wait_until(lambda: clients.statuses[429] >= 6 * CAPACITY)
    server.engine.is_held = False
    statuses = clients.wait()
    assert set(statuses) == {200, 429}
    assert server.engine.tokens == statuses[200] * TOKENS
    assert len(server.engine.requests) == statuses[200]
    assert server.engine.most_answers == 2 * CAPACITY
    assert server.context.admission.in_flight == 0


def test_answers_count_not_requests(server):
    with server.http() as http:
        body = {"prompt": "x", "max_tokens": 1}
        assert http.post("/v1/completions", json=body | {"n": 2 * CAPACITY}).status_code == 200
        assert http.post("/v1/completions", json=body | {"n": 2 * CAPACITY + 1}).status_code == 400
