"""The load generator against a server that behaves, and one that does not."""

import asyncio
import json
from typing import Any

import pytest

from foreword.bench.prompts import own_prompts
from foreword.bench.serve.generator import Ending, LoadGenerator, LoadRun
from foreword.bench.serve.load import LoadSettings, RequestTemplate
from foreword.bench.serve.report import Report, make_report
from foreword.errors import RequestError
from foreword.wire.openai_http import ListedModel, listed_model, open_client
from helpers.command_line import assert_one_line_error, foreword
from helpers.fake_openai_server import Behaviour, FakeServer, fake_server
from helpers.waiting import wait_until


def run_load(server: FakeServer, load: LoadSettings, **fields: Any) -> LoadRun:
    async def run() -> LoadRun:
        async with open_client(server.url, "a-key") as client:
            return await LoadGenerator(client, RequestTemplate("fake", **fields), load).run(
                own_prompts(), seen.append
            )

    seen: list[object] = []
    result = asyncio.run(run())
    assert len(seen) == len(result.outcomes)
    return result


def report_of(behaviour: Behaviour, load: LoadSettings | None = None, **fields: Any) -> Report:
    with fake_server(behaviour) as server:
        return make_report(
            run_load(server, load or LoadSettings(concurrency=2, num_requests=6), **fields), None
        )


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_an_open_loop_sends_every_request_and_counts_its_tokens(endpoint: str):
    with fake_server(Behaviour(chunks=5, tokens_per_chunk=3)) as server:
        run = run_load(server, LoadSettings(rate=200.0, num_requests=20, seed=4), endpoint=endpoint, seed=50)
        assert sorted(body["seed"] for body in server.bodies) == list(range(50, 70))
        assert set(server.keys) == {"Bearer a-key"}
    report = make_report(run, None)
    assert (report.sent, report.completed, report.failed) == (20, 20, 0)
    assert (report.output_tokens, report.prompt_tokens, report.without_usage) == (20 * 15, 20 * 5, 0)
    assert report.latencies["itl"].n == 20 * 4
    assert report.latencies["itl_per_token"].n == 20 * 4 * 3
    for outcome in run.outcomes:
        assert outcome.last_event_time is not None and outcome.sent is not None
        times = [
            outcome.due,
            outcome.sent,
            *(chunk.time for chunk in outcome.chunks),
            outcome.last_event_time,
            outcome.ended_at,
        ]
        assert times == sorted(times)


def test_all_at_once_is_at_once_and_a_closed_loop_keeps_its_number():
    with fake_server(Behaviour(company=12)) as server:
        run_load(server, LoadSettings(rate=float("inf"), num_requests=12))
        assert server.most_at_once == 12
    with fake_server(Behaviour(company=3, first_delay=0.02)) as server:
        run = run_load(server, LoadSettings(concurrency=3, num_requests=12))
        assert (len(run.outcomes), server.most_at_once) == (12, 3)


def test_a_duration_bounds_the_starts_and_what_runs_is_finished():
    with fake_server(Behaviour(first_delay=0.05)) as server:
        run = run_load(server, LoadSettings(concurrency=2, duration=0.3))
    assert {outcome.ending for outcome in run.outcomes} == {Ending.COMPLETED}
    assert len(run.outcomes) >= 2
    assert len(server.bodies) == len(run.outcomes)


def test_refusals_are_counted_by_status_with_their_retry_after():
    report = report_of(Behaviour(refuse_every=3), LoadSettings(concurrency=1, num_requests=9))
    assert (report.completed, report.failures) == (6, {"HTTP 429": 3})
    assert (report.http_429.with_retry_after, report.http_429.retry_after) == (3, ("3",))
    assert report.failure_details == {"HTTP 429": "full"}
    report = report_of(Behaviour(status=503))
    assert (report.completed, report.failures) == (0, {"HTTP 503": 6})


def test_a_server_without_usage_is_named_and_its_chunks_are_counted():
    report = report_of(Behaviour(chunks=7, usage=False))
    assert (report.completed, report.without_usage, report.counted_by_chunks) == (6, 6, 6)
    assert report.output_tokens == 6 * 7


@pytest.mark.parametrize(
    ("behaviour", "kind"),
    [
        (Behaviour(dies_after=2), "cut off by the server"),
        (Behaviour(ends_after=2), "cut off by the server"),
        (Behaviour(events=["{not json"]), "malformed answer"),
        (Behaviour(events=['{"object": "nothing"}']), "malformed answer"),
        (Behaviour(events=["[DONE]"]), "malformed answer"),
        (Behaviour(events=['{"choices": [{"delta": {"role": "assistant"}}]}', "[DONE]"]), "malformed answer"),
        (Behaviour(events=['{"error": {"message": "out of pages"}}']), "error in the stream"),
        (Behaviour(first_delay=600.0), "timeout"),
    ],
)
def test_an_answer_that_breaks_is_no_answer(behaviour: Behaviour, kind: str):
    report = report_of(
        behaviour, LoadSettings(concurrency=2, num_requests=4, timeout=0.3 if kind == "timeout" else 60.0)
    )
    assert report.failures == {kind: 4}
    assert report.completed == report.output_tokens == report.latencies["ttft"].n == 0


def test_no_server_at_all_is_a_failure_of_each_and_of_the_question_for_models():
    with fake_server() as server:
        pass
    run = run_load(server, LoadSettings(concurrency=2, num_requests=4))
    assert make_report(run, None).failures == {"no response": 4}

    async def ask_for_models() -> object:
        async with open_client(server.url, None) as client:
            return await listed_model(client)

    with pytest.raises(RequestError, match="no server answers"):
        asyncio.run(ask_for_models())


def test_models_are_found_by_name_with_who_serves_them():
    async def ask(url: str, name: str = "") -> tuple[str, str | None]:
        async with open_client(url, None) as client:
            model = await listed_model(client, name)
            return model.name, model.owner

    with fake_server() as server:
        assert asyncio.run(ask(server.url)) == ("fake", None)
        assert asyncio.run(ask(server.url, "other")) == ("other", "vllm")
        assert asyncio.run(ask(server.url, "third")) == ("third", None)
    assert asyncio.run(ask(server.url, "other")) == ("other", None)  # it is gone: that shows soon enough
    assert [
        ListedModel("m", owner).has_continuous_usage for owner in ("foreword", "vllm", "openai", None)
    ] == [True, True, False, False]


def test_dropped_streams_are_seen_by_the_server_and_measured_by_nobody():
    with fake_server(Behaviour(chunks=40, delay=0.02)) as server:
        run = run_load(
            server, LoadSettings(concurrency=4, num_requests=12, disconnect=0.5, seed=1), max_tokens=20
        )
        report = make_report(run, None)
        planned = [outcome for outcome in run.outcomes if outcome.drop_after is not None]
        assert 0 < len(planned) < 12
        assert (report.dropped, report.failed) == (len(planned), 0)
        assert report.completed == report.latencies["ttft"].n == 12 - len(planned)
        assert all(len(outcome.chunks) == outcome.drop_after for outcome in planned)
        wait_until(lambda: server.left == len(planned))


def test_the_command_prints_tables_and_one_line_of_json():
    with fake_server(Behaviour(tokens_per_chunk=2)) as server:
        arguments = ["--url", f"{server.url}/v1", "--num-requests", "5", "--goodput", "e2el:60000", "--json"]
        run = foreword("bench", "serve", *arguments, "--speculation", "off", env={"FOREWORD_API_KEY": "hush"})
        assert run.returncode == 0, run.stderr
        assert all(body["speculation"] is False and body["model"] == "fake" for body in server.bodies)
        assert set(server.keys) == {"Bearer hush"}
    assert "hush" not in run.stdout + run.stderr
    result = json.loads(run.stdout)
    assert (result["completed"], result["output_tokens"], result["loop"]) == (5, 40, "closed")
    assert result["goodput"]["share"] == 1.0
    assert "TPOT" in run.stderr


def test_the_command_fails_if_nothing_was_answered_and_refuses_nonsense():
    with fake_server(Behaviour(status=500)) as server:
        run = foreword(
            "bench", "serve", "--url", server.url, "--rate", "inf", "--num-requests", "2", "--json"
        )
        assert run.returncode == 1
        assert json.loads(run.stdout)["failures"] == {"HTTP 500": 2}
    both = foreword("bench", "serve", "--url", server.url, "--rate", "1", "--concurrency", "1")
    assert_one_line_error(both, "--rate", "--concurrency")
    assert_one_line_error(foreword("bench", "serve", "--url", server.url), "no server answers")
