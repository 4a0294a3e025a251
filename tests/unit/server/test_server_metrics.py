"""Metrics: names that dashboards know, and numbers that add up."""

from dataclasses import replace
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.engine.learning import LearningReport
from foreword.engine.messages import AnswerDelta, EngineStats, NewRequest, RequestStats
from foreword.engine.outputs import Costs, sum_stats
from foreword.server.learning_metrics import STATES
from foreword.server.metrics import Metrics
from foreword.server.request_meter import RequestMeter

VLLM_NAMES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "num_preemptions_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
)

OUR_NAMES = (
    "spec_decode_draft_seconds_total",
    "spec_decode_verify_seconds_total",
    "spec_decode_accept_seconds_total",
    "spec_decode_accepted_run_length",
    "spec_decode_num_first_rejections_per_pos_total",
    "spec_decode_rollback_tokens_total",
    "spec_decode_rejected_kv_bytes_total",
    "spec_decode_target_passes_per_output_token",
    "spec_decode_output_tokens_total",
    "spec_decode_num_drafts_per_pos_total",
    "spec_decode_drafter_faults_total",
    "spec_decode_drafter_memory_bytes",
    "spec_decode_enabled",
    "engine_steps_total",
    "engine_step_seconds_total",
    "engine_step_faults_total",
    "kv_cache_pages_used",
)

STATS = RequestStats(
    prompt_tokens=10,
    cached_tokens=4,
    output_tokens=9,
    passes=5,
    drafts=4,
    drafted=7,
    accepted=4,
    drafted_per_position=(4, 3),
    accepted_per_position=(3, 1),
    rejected_per_position=(1, 2),
    rollback_tokens=3,
    rejected_kv_bytes=192,
    method="ngram",
    cohort="ngram/greedy",
    draft_seconds=0.5,
    preemptions=2,
)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"foreword:{name}", {"model_name": "m", **labels})


def test_the_names_are_vllms_behind_our_prefix_and_ours():
    page = Metrics("m").exposition().decode()
    for name in (*VLLM_NAMES, *OUR_NAMES):
        assert f"# TYPE foreword:{name} " in page, name


def test_an_answer_is_counted_by_method_and_cohort():
    metrics = Metrics("m")
    metrics.note_answer(STATS, "stop")
    metrics.note_costs(0, STATS)
    labels = {"method": "ngram", "cohort": "ngram/greedy"}
    assert value(metrics, "spec_decode_num_drafts_total", **labels) == 4
    assert value(metrics, "spec_decode_num_draft_tokens_total", **labels) == 7
    assert value(metrics, "spec_decode_num_accepted_tokens_total", **labels) == 4
    assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", **labels, position="0") == 3
    assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", **labels, position="1") == 1
    assert value(metrics, "spec_decode_num_first_rejections_per_pos_total", **labels, position="1") == 2
    assert value(metrics, "spec_decode_rejected_kv_bytes_total", **labels) == 192
    assert value(metrics, "spec_decode_draft_seconds_total", **labels) == 0.5
    assert value(metrics, "spec_decode_target_passes_per_output_token_sum", **labels) == 5 / 9
    assert value(metrics, "spec_decode_output_tokens_total", **labels) == 9
    assert value(metrics, "spec_decode_num_drafts_per_pos_total", **labels, position="1") == 3
    assert metrics.totals == {"ngram/greedy": STATS}


def test_tokens_of_the_first_pass_take_no_time_of_decoding():
    metrics = Metrics("m")
    metrics.note_answer(RequestStats(output_tokens=9, first_tokens=4, decode_seconds=1.0), "stop")
    metrics.note_answer(RequestStats(output_tokens=4, first_tokens=4, decode_seconds=0.0), "stop")
    assert value(metrics, "request_time_per_output_token_seconds_sum") == 1.0 / 5
    assert value(metrics, "request_time_per_output_token_seconds_count") == 1


def test_runs_have_the_lengths_that_the_positions_tell():
    metrics = Metrics("m")
    metrics.note_costs(0, STATS)  # of four drafts one was refused at once, two after one token, one after two
    labels = {"method": "ngram", "cohort": "ngram/greedy"}
    for length, drafts in {"0.0": 1, "1.0": 3, "2.0": 4, "+Inf": 4}.items():
        assert value(metrics, "spec_decode_accepted_run_length_bucket", **labels, le=length) == drafts


def test_a_fresh_engines_counters_go_on_from_the_old_ones():
    metrics = Metrics("m")
    for faults, restarts in ((2, 0), (5, 0), (5, 0), (1, 1), (4, 1), (6, 2)):
        metrics.note_engine(EngineStats(preemptions=2 * faults, drafter_faults={"ngram": faults}), restarts)
    assert value(metrics, "spec_decode_drafter_faults_total", method="ngram") == 5 + 4 + 6
    assert value(metrics, "num_preemptions_total") == 10 + 8 + 12


def test_the_engines_own_figures():
    metrics = Metrics("m")
    metrics.note_engine(
        EngineStats(
            kv_pages=10,
            kv_pages_used=5,
            prefix_queries=30,
            prefix_hits=20,
            steps=7,
            draft_seconds=1.0,
            verify_seconds=4.0,
            accept_seconds=0.5,
            step_seconds=6.0,
            speculating=False,
            drafter_memory_bytes=1000,
            step_faults={"verify": 3},
        ),
        restarts=0,
    )
    assert value(metrics, "kv_cache_usage_perc") == 0.5
    assert value(metrics, "kv_cache_pages_used") == 5
    assert value(metrics, "prefix_cache_queries_total") == 30
    assert value(metrics, "prefix_cache_hits_total") == 20
    assert value(metrics, "engine_steps_total") == 7
    stages = {"draft": 1.0, "verify": 4.0, "accept": 0.5, "other": 0.5}
    for stage, seconds in stages.items():
        assert value(metrics, "engine_step_seconds_total", stage=stage) == seconds
    assert value(metrics, "spec_decode_enabled") == 0
    assert value(metrics, "spec_decode_drafter_memory_bytes") == 1000
    assert value(metrics, "engine_step_faults_total", stage="verify") == 3


def test_the_training_of_the_head_is_counted_over_engines():
    metrics = Metrics("m")
    for trainings, restarts in ((2, 0), (3, 0), (1, 1)):
        report = LearningReport("training", trainings=trainings, train_seconds=10.0 * trainings)
        metrics.note_engine(EngineStats(learning=report), restarts)
    assert value(metrics, "learn_trainings_total") == 3 + 1
    assert value(metrics, "learn_train_seconds_total") == 30 + 10
    assert [value(metrics, "learn_state", state=state) for state in STATES] == [0, 1, 0, 0, 0]
    assert value(metrics, "learn_version") == 0
    assert value(metrics, "learn_tokens_per_pass", head="newest") is None  # before there is a version


def test_a_request_is_measured_from_acceptance_to_end():
    metrics = Metrics("m")
    request = NewRequest("a", (1,), SamplingParams(n=2, max_tokens=5))
    meter = RequestMeter(metrics, request)
    for index in (0, 1):
        meter.note(AnswerDelta("a", index, "", ()))  # text that is held back is no token
        meter.note(AnswerDelta("a", index, "x", (1,)))
        meter.note(AnswerDelta("a", index, "yz", (2, 3)))
        meter.note(AnswerDelta("a", index, "", (4,), finish_reason="length", stats=STATS))
    meter.note_closed()
    assert value(metrics, "time_to_first_token_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_count") == 4
    assert value(metrics, "e2e_request_latency_seconds_count") == 2
    assert value(metrics, "request_success_total", finished_reason="length") == 2
    assert value(metrics, "prompt_tokens_total") == 1  # one prompt, two answers
    assert (
        value(metrics, "generation_tokens_total") == 18
    )  # what was not delivered was generated all the same
    assert value(metrics, "request_success_total", finished_reason="abort") is None
    assert value(metrics, "request_params_n_sum") == 2


DRAFTED = RequestStats(
    prompt_tokens=2,
    output_tokens=4,
    passes=2,
    drafts=2,
    drafted=5,
    accepted=2,
    rollback_tokens=3,
    method="suffix",
    cohort="suffix/greedy",
)


def half_an_answer(metrics: Metrics, **request: Any) -> RequestMeter:
    """Two deltas: of two guesses one was accepted, of three also one."""
    asked = {"params": SamplingParams(temperature=0), "speculation": {"method": "suffix"}} | request
    meter = RequestMeter(metrics, NewRequest("a", (1, 2), **asked), "ngram")
    meter.note(AnswerDelta("a", 0, "x", (1, 2), from_draft=1, drafted=2))
    meter.note(AnswerDelta("a", 0, "y", (3, 4), from_draft=1, drafted=3))
    return meter


def test_what_was_done_for_a_client_that_has_left_is_counted():
    metrics = Metrics("m")
    meter = half_an_answer(metrics)
    assert value(metrics, "generation_tokens_total") == 4  # when it is done, not at the end
    assert value(metrics, "prompt_tokens_total") == 2
    meter.note_closed()
    assert value(metrics, "request_success_total", finished_reason="abort") == 1
    assert metrics.totals == {}
    stats = replace(DRAFTED, output_tokens=6, passes=4)
    for _ in range(2):
        meter.note_late(AnswerDelta("a", 0, "", (), finish_reason="abort", stats=stats))
    assert metrics.totals == {"suffix/greedy": stats}
    assert value(metrics, "generation_tokens_total") == 6
    assert value(metrics, "request_success_total", finished_reason="abort") == 1


@pytest.mark.parametrize("left_first", [True, False])
def test_what_was_done_by_an_engine_that_has_died_is_counted_as_far_as_it_was_told(left_first):
    metrics = Metrics("m")
    meter = half_an_answer(metrics)
    if left_first:
        meter.note_closed()
        meter.note_late(RuntimeError("the engine has died"))
    else:
        meter.note_engine_lost()
        meter.note_closed()
    assert metrics.totals == {"suffix/greedy": DRAFTED}
    reason = "abort" if left_first else "error"
    assert value(metrics, "request_success_total", finished_reason=reason) == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 0


@pytest.mark.parametrize(
    ("setting", "cohort"),
    [
        (None, "ngram/greedy"),
        (True, "ngram/greedy"),
        (False, "plain/greedy"),
        ({"method": "suffix"}, "suffix/greedy"),
        ({"num_speculative_tokens": 3}, "ngram/greedy"),
    ],
)
def test_a_lost_answer_is_counted_with_its_own(setting, cohort):
    metrics = Metrics("m")
    half_an_answer(metrics, speculation=setting).note_engine_lost()
    assert list(metrics.totals) == [cohort]


def test_a_refused_request_is_no_answer():
    metrics = Metrics("m")
    meter = RequestMeter(metrics, NewRequest("a", (1,)))
    meter.note_refused()
    meter.note_closed()
    assert metrics.totals == {}
    assert "finished_reason" not in metrics.exposition().decode()


def test_costs_of_several_answers_add_up_and_a_prompt_counts_once():
    total = sum_stats([(0, STATS), (1, STATS)])
    assert (total.prompt_tokens, total.cached_tokens, total.output_tokens) == (10, 4, 18)
    assert total.accepted_per_position == (6, 2)
    assert total.method == "ngram"
    assert sum_stats([(0, STATS), (0, STATS)]).prompt_tokens == 20


def test_costs_are_complete_with_the_last_end():
    costs = Costs(2)
    end = AnswerDelta("a", 0, "", (), finish_reason="stop", stats=STATS)
    assert [costs.note(AnswerDelta("a", 0, "x", (1,))), costs.note(end), costs.note(end)] == [
        False,
        False,
        True,
    ]
    assert costs.total().output_tokens == 18
