"""Timings in llama.cpp's names, from the statistics of answers that ran at the same time."""

import pytest

from foreword.engine.messages import RequestStats
from foreword.engine.outputs import Timings


def stats(**fields: float) -> RequestStats:
    return RequestStats(**fields)  # type: ignore[arg-type]


def test_cached_tokens_are_not_processed():
    told = Timings.of([(0, stats(prompt_tokens=100, cached_tokens=60, prefill_seconds=2.0))])
    assert (told.prompt_n, told.cache_n, told.prompt_ms, told.prompt_per_second) == (40, 60, 2000, 20)


def test_tokens_of_the_first_pass_took_no_time_of_decoding():
    told = Timings.of([(0, stats(output_tokens=40, first_tokens=5, decode_seconds=0.2))])
    assert told.predicted_n == 40
    assert told.predicted_per_second == pytest.approx(35 / 0.2)
    assert Timings.of([(0, stats(output_tokens=5, first_tokens=5))]).predicted_per_second == 0


def test_a_rate_of_several_prompts_is_over_the_time_that_passed():
    first = stats(
        prompt_tokens=10,
        output_tokens=11,
        first_tokens=1,
        queue_seconds=1.0,
        prefill_seconds=1.0,
        decode_seconds=4.0,
    )
    second = stats(
        prompt_tokens=20,
        output_tokens=12,
        first_tokens=2,
        queue_seconds=2.0,
        prefill_seconds=2.0,
        decode_seconds=3.0,
    )
    told = Timings.of([(0, second), (0, first)])
    assert told.queue_ms == 1000
    assert (told.prompt_n, told.prompt_ms, told.prompt_per_second) == (30, 3000, 10)
    assert told.predicted_ms == 1e3 * (7 - 2)  # from the first's first token to the second's last
    assert told.predicted_per_second == (10 + 10) / 5


def test_a_prompt_with_several_answers_is_processed_once():
    leader = stats(prompt_tokens=10, output_tokens=5, first_tokens=1, prefill_seconds=1.0, decode_seconds=2.0)
    follower = stats(prompt_tokens=10, cached_tokens=9, output_tokens=7, first_tokens=1, queue_seconds=1.0,
                     prefill_seconds=0.5, decode_seconds=3.0)  # fmt: skip
    told = Timings.of([(1, follower), (0, leader)])
    assert (told.prompt_n, told.cache_n, told.prompt_ms) == (10, 0, 1000)
    assert (told.predicted_n, told.predicted_ms) == (12, 3500)
    assert told.predicted_per_second == pytest.approx(10 / 3.5)
