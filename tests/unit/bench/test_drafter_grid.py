"""The grid of drafters: what is worked out of a record, and the page."""

from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest

from foreword.bench.drafters.grid import GridRecord, cpu_speedups, grid_page, speedups
from foreword.bench.ledger import restored

PLAIN = GridRecord(
    drafter="plain",
    category="chat",
    temperature=0.0,
    concurrency=4,
    requests=8,
    tokens=400,
    passes=400,
    seconds=20.0,
    draft_seconds=0.0,
    verify_seconds=18.0,
    accept_seconds=1.0,
    latency_p50=9.0,
    latency_max=11.0,
)
GUESSED = replace(
    PLAIN,
    drafter="<ngram>",
    passes=200,
    seconds=10.0,
    draft_seconds=1.0,
    drafted_per_position=(100, 100),
    accepted_per_position=(80, 40),
)


def test_rates_and_costs_follow_from_a_record():
    assert GUESSED.acceptance == pytest.approx(0.6)
    assert GUESSED.per_position == [0.8, 0.4]
    assert GUESSED.tokens_per_pass == 2
    assert GUESSED.tokens_per_second == 40
    assert GUESSED.cost_per_million(3.6) == pytest.approx(3.6 / 3600 * 10 / 400 * 1e6)
    assert speedups([PLAIN, GUESSED])[GUESSED.key] == 2
    assert speedups([GUESSED]) == {}
    assert cpu_speedups([PLAIN, GUESSED]) == {}  # a device did the work
    timed = [replace(PLAIN, cpu_seconds=6.0), replace(GUESSED, cpu_seconds=4.0)]
    assert cpu_speedups(timed)[GUESSED.key] == 1.5


def test_a_record_is_read_back():
    assert restored(GridRecord, asdict(GUESSED) | {"drafted_per_position": [100, 100]}) == GUESSED
    with pytest.raises(ValueError, match="not a measurement"):
        restored(GridRecord, {"drafter": "x"})


def test_the_page_needs_nothing_else_and_escapes_names():
    more = [replace(r, concurrency=16) for r in (PLAIN, GUESSED)] + [
        replace(r, temperature=0.7) for r in (PLAIN, GUESSED)
    ]
    page = grid_page([PLAIN, GUESSED, *more], "a <model>", {"date": "2026-01-02"}, 2.0)
    assert "<ngram>" not in page
    assert "&lt;ngram&gt;" in page
    assert "http" not in page
    assert "chat, temperature 0.7" in page
    for picture in page.split("<svg")[1:]:
        ElementTree.fromstring("<svg" + picture.split("</svg>")[0] + "</svg>")
