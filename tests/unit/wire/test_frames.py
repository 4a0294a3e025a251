"""The channel between API process and engine process."""

import asyncio
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.acceptance.logprobs import TokenLogprobs
from foreword.acceptance.params import SamplingParams
from foreword.cluster.framing import ChannelError, FrameSplitter
from foreword.control.reporting.figures import Band, Bounds, ControlReport, DecisionReport, PairReport, Usage
from foreword.engine.learning import LearningReport, VersionReport
from foreword.engine.messages import (
    AnswerDelta,
    CohortTotals,
    EngineStats,
    NewRequest,
    RequestLabels,
    RequestStats,
)
from foreword.structured.params import StructuredOutputs
from foreword.wire import frames as wire

PARAMS = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=5,
    min_p=0.1,
    presence_penalty=1.0,
    frequency_penalty=-1.0,
    repetition_penalty=1.2,
    logit_bias={3: -100.0, 70000: 2.5},
    bad_words=("a", "ö"),
    allowed_token_ids=(1, 2),
    stop=("x", "\n"),
    include_stop_str_in_output=True,
    stop_token_ids=(9,),
    max_tokens=7,
    min_tokens=2,
    n=3,
    seed=2**64 - 1,
    ignore_eos=True,
    logprobs=2,
    prompt_logprobs=1,
)
FULL_STATS = EngineStats(
    running=1,
    waiting=2,
    kv_pages=10,
    kv_pages_used=5,
    prefix_queries=30,
    prefix_hits=20,
    preemptions=1,
    steps=9,
    draft_seconds=0.1,
    verify_seconds=0.2,
    accept_seconds=0.3,
    step_seconds=0.7,
    speculating=False,
    drafter_memory_bytes=2**40,
    drafter_faults={"ngram": 3},
    step_faults={"verify": 1},
    acceptance={"ngram/greedy": (1, 2, 3)},
    cohorts={"ngram/greedy": CohortTotals(4, 3, 9, 0.5, 0.25, 0.125)},
    control=ControlReport(
        policy_file="policy.json",
        pairs=(
            PairReport(
                "ngram",
                "code/greedy",
                state="canary",
                percent=5.0,
                predicted=Bounds(1.0, 1.1, 1.2),
                depths=(0, 3, 4),
                acceptance_by_level=(0.5, 0.25),
                acceptance_by_position=(Band(0, 9, 5),),
                decisions=(DecisionReport(1.0, "on", "gains", 1.1),),
            ),
        ),
        usage=Usage(10.0, 1.0, 5.0, 100, 1.0, 3.0),
    ),
    learning=LearningReport("training", versions=(VersionReport(1, "on", "", 5.0, 10, 2.5, 1.5, 2.0),)),
)
TO_ENGINE = [
    wire.Start("model", "int8", "cpu", "cpu", {"method": "ngram"}, {"max_model_len": 5}),
    wire.Submit(
        NewRequest("a", (1, 2, 3), PARAMS, "tenant", {"method": "suffix", "num_speculative_tokens": 3})
    ),
    wire.Submit(NewRequest("b", (1,), SamplingParams(stop="one"), speculation=False)),
    wire.Submit(NewRequest("f", (1,), SamplingParams(structured=StructuredOutputs(json={"type": "object"})))),
    wire.Submit(NewRequest("g", (1,), SamplingParams(structured=StructuredOutputs(choice=["a", "b"])))),
    wire.Submit(NewRequest("c", (1,), labels=RequestLabels({"task": "code"}, "batch", stream=True))),
    wire.MovePair("head", "code", "off"),
    wire.LearnAction("forget", "5f2a"),
    wire.Abort("a"),
    wire.Speculate(False),
    wire.StatsWanted(7),
    wire.Drain(1.5),
]
FROM_ENGINE = [
    wire.Starting("loading", 3, 7),
    wire.Ready(8192),
    wire.Deltas([AnswerDelta("a", 2, "text ✓", (1, 2), from_draft=1), AnswerDelta("b", 0, "", ())]),
    wire.Deltas(
        [
            AnswerDelta(
                "a",
                0,
                "",
                (),
                finish_reason="stop",
                stop_reason="\n",
                seed=2**64 - 1,
                stats=RequestStats(1, 2, 3),
            )
        ]
    ),
    wire.Refused("a", "too long", "max_tokens"),
    wire.Stats(7, FULL_STATS),
    wire.Stats(8, EngineStats()),
    wire.Fatal("no memory"),
]


def payload(frame: bytes) -> bytes:
    (content,) = FrameSplitter().feed(frame)
    return content


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_to_the_engine_arrive_as_they_were_sent(message):
    assert wire.decode_to_engine(payload(wire.encode(message))) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda m: type(m).__name__)
def test_messages_from_the_engine_arrive_as_they_were_sent(message):
    assert wire.decode_from_engine(payload(wire.encode(message))) == message


def test_log_probabilities_arrive_as_arrays():
    sent = TokenLogprobs(5, -0.25, 1, np.array([5, 6]), np.array([-0.25, -np.inf]))
    message = wire.Deltas([AnswerDelta("a", 0, "x", (5,), (sent,), prompt_logprobs=(sent,))])
    arrived = wire.decode_from_engine(payload(wire.encode(message)))
    assert isinstance(arrived, wire.Deltas)
    for got in (arrived.deltas[0].logprobs[0], arrived.deltas[0].prompt_logprobs[0]):
        assert (got.token, got.logprob, got.rank) == (5, -0.25, 1)
        assert got.top_ids.dtype == np.int64
        assert got.top_logprobs.dtype == np.float64
        np.testing.assert_array_equal(got.top_ids, sent.top_ids)
        np.testing.assert_array_equal(got.top_logprobs, sent.top_logprobs)


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 20), min_size=1))
def test_frames_are_found_however_the_stream_is_cut(contents, cuts):
    stream = b"".join(struct.pack(">I", len(content)) + content for content in contents)
    splitter, found, at, turn = FrameSplitter(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        found += splitter.feed(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert found == contents
    assert not splitter.inside_frame


def test_a_frame_over_the_limit_is_refused_before_it_is_read():
    with pytest.raises(ChannelError, match="over the limit"):
        FrameSplitter(limit=100).feed(struct.pack(">I", 101))


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_happens(garbage):
    for decode in (wire.decode_to_engine, wire.decode_from_engine):
        with pytest.raises(ChannelError):
            decode(garbage)


@given(st.integers(0, 400), st.integers(1, 255))
def test_a_damaged_message_is_refused_or_still_a_message(position, flip):
    frame = bytearray(payload(wire.encode(TO_ENGINE[1])))
    frame[position % len(frame)] ^= flip
    try:
        assert isinstance(wire.decode_to_engine(bytes(frame)), wire.ToEngine)
    except ChannelError as error:
        assert "no message" in str(error)


def test_parameters_out_of_bounds_do_not_pass_the_channel():
    sent = msgspec.to_builtins(TO_ENGINE[1]) | {}
    sent["request"]["params"]["temperature"] = -1.0
    with pytest.raises(ChannelError, match="temperature"):
        wire.decode_to_engine(msgspec.msgpack.encode(sent))


def test_messages_of_the_other_direction_are_refused():
    with pytest.raises(ChannelError):
        wire.decode_to_engine(payload(wire.encode(wire.Fatal("x"))))


@pytest.mark.parametrize(
    ("tail", "damaged"), [(b"", False), (b"\0\0", True), (struct.pack(">I", 9) + b"x", True)]
)
def test_a_channel_that_ends_inside_a_frame_says_so(tail, damaged):
    async def run() -> list[bytes]:
        reader = asyncio.StreamReader()
        reader.feed_data(wire.encode(wire.Abort("a")) + tail)
        reader.feed_eof()
        return [frame async for frame in wire.Channel(reader, None).frames()]  # type: ignore[arg-type]

    if damaged:
        with pytest.raises(ChannelError, match="middle of a frame"):
            asyncio.run(run())
    else:
        assert len(asyncio.run(run())) == 1
