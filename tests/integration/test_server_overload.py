"""Beyond its capacity the server does as much as at its best, and refuses the rest properly."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from foreword.server.settings import Limits, ServerSettings
from helpers.fake_engine import FakeEngine
from helpers.local_server import LocalServer, local_server

CAPACITY = 4
TOKENS = 8


def load(server: LocalServer, clients: int, answers: int) -> tuple[Counter[int], int]:
    """Closed-loop load until so many answers were given; statuses, and the passes that it took."""
    before, statuses, lock = server.engine.passes, Counter[int](), threading.Lock()

    def client(number: int) -> None:
        with server.http() as http:
            while statuses[200] < answers:
                body = {"prompt": [5, 6, number + 7], "max_tokens": TOKENS, "speculation": False}
                answer = http.post("/v1/completions", json=body)
                with lock:
                    statuses[answer.status_code] += 1
                if answer.status_code == 429:
                    assert 1 <= int(answer.headers["retry-after"]) <= 60
                    assert answer.json()["error"]["code"] == "queue_full"
                    assert answer.json()["error"]["type"] == "rate_limit_error"

    with ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client, number) for number in range(clients)]:
            done.result()
    return statuses, server.engine.passes - before


@pytest.fixture(scope="module")
def server(tiny_model):
    limits = Limits(running=CAPACITY, queued=CAPACITY)
    engine = FakeEngine(step_seconds=0.02, capacity=CAPACITY)
    with local_server(tiny_model, ServerSettings("tiny", limits=limits), engine) as running:
        yield running


def test_goodput_stays_at_four_times_the_capacity(server):
    """Goodput per pass of the engine: the passes are what is scarce, and they don't depend on the machine's mood."""
    peak, peak_passes = load(server, 2 * CAPACITY, 40)
    assert set(peak) == {200}
    over, over_passes = load(server, 8 * CAPACITY, 40)
    assert set(over) == {200, 429}
    assert over[200] / over_passes >= 0.95 * peak[200] / peak_passes
    assert over[200] / over_passes >= 0.8 * CAPACITY / TOKENS
    assert server.context.admission.in_flight == 0


def test_answers_count_not_requests(server):
    with server.http() as http:
        body = {"prompt": "x", "max_tokens": 1}
        assert http.post("/v1/completions", json=body | {"n": 2 * CAPACITY}).status_code == 200
        assert http.post("/v1/completions", json=body | {"n": 2 * CAPACITY + 1}).status_code == 400
