"""`bench pacing`: streams of a real engine, and a classifier that is neither blind nor clairvoyant."""

import json
import random

import pytest

from foreword import LLM, SamplingParams
from foreword.bench.pacing import EVENT_BYTES, WireChunk, classify_prompts, record, short_prompts
from foreword.errors import RequestError
from foreword.server.api.pacing import BLOCK_BYTES, PaceMemory, replay
from helpers.command_line import foreword


def stream(seed: int, noise: int, sizes: int = 40) -> list[WireChunk]:
    """Chunks whose sizes belong to the prompt and whose times do not."""
    own, others = random.Random(seed), random.Random(1000 * seed + noise)
    times, now = [], 0.0
    for _ in range(sizes):
        now += 0.01 + 0.001 * others.random()
        times.append(now)
    return [WireChunk(time, 200 + own.randint(0, 50)) for time in times]


def test_the_classifier_finds_what_is_there_and_nothing_else():
    watched = {(prompt, repeat): stream(prompt, repeat) for prompt in range(20) for repeat in range(4)}
    found = {row.features: row for row in classify_prompts("x", watched)}
    assert found["sizes"].accuracy == 1
    assert found["timing"].accuracy < 0.25
    assert found["sizes"].trials == 80
    assert found["sizes"].chance == 1 / 20


def test_streams_that_all_look_alike_are_guessed_by_chance():
    same = [WireChunk(0.01 * number, 1024) for number in range(30)]
    watched = {(prompt, repeat): same for prompt in range(25) for repeat in range(4)}
    for row in classify_prompts("x", watched):
        assert row.right <= 14, row.features  # 4 of 100 are expected


def test_one_repeat_is_not_enough():
    with pytest.raises(RequestError, match="--repeats"):
        classify_prompts("x", {(prompt, 0): stream(prompt, 0) for prompt in range(3)})


def test_traces_are_the_engines_own_deliveries(tiny_model):
    llm = LLM(str(tiny_model), speculation={"method": "ngram", "num_speculative_tokens": 3})
    prompts = [llm.encode(text, raw=True) for text in ("abababababab", "cdcdcdcdcd")]
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    traces = record(llm.engine, prompts, 2, params, True, lambda done, total: None)
    assert [(trace.prompt, trace.repeat) for trace in traces] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for trace in traces:
        assert sum(len(sizes) for _, sizes in trace.bursts) == 30
        assert len(trace.unpaced()) == len(trace.bursts) < 30
        assert all(chunk.size >= EVENT_BYTES for chunk in trace.unpaced())
        blocks = replay(trace.units(), PaceMemory())
        assert sum(block.units for block in blocks) == 30
        assert {block.size % BLOCK_BYTES for block in blocks} == {0}
    plain = record(llm.engine, prompts, 1, params, False, lambda done, total: None)
    assert all(len(trace.bursts) == 30 and trace.unevenness == 0 for trace in plain)
    assert any(trace.unevenness for trace in traces)


def test_fifty_different_prompts():
    assert len(set(short_prompts(50))) == 50
    with pytest.raises(RequestError, match="50 prompts"):
        short_prompts(51)


def test_the_command(tiny_model):
    run = foreword(
        *("bench", "pacing", "--model", str(tiny_model), "--prompts", "3", "--repeats", "2", "--tokens", "8"),
        "--json",
    )
    assert run.returncode == 0, run.stderr
    rows = json.loads(run.stdout)["rows"]
    assert len(rows) == 12
    assert {row["trials"] for row in rows} == {6}
