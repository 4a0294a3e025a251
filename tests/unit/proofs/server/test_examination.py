"""Correct servers pass the examination, each planted fault is refuted by its name."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace

import httpx2
import pytest

from foreword.errors import RequestError
from foreword.proofs.server.claims import CHECKS
from foreword.proofs.server.client import Server
from foreword.proofs.server.context import (
    FULL,
    MOST_REQUESTS,
    SMALL,
    STANDARD,
    ClaimStatus,
    ClaimVerdict,
    ExaminationPlan,
)
from foreword.proofs.server.examination import chosen, cost, examine, prepare
from foreword.wire.openai_http import open_client
from helpers.faulty_proxy import FAULTS, FaultyProxy
from helpers.known_law_server import ChangesTexts, CutsStreams, KnownLaws

PLAN = ExaminationPlan("test", prompts=2, tokens=24, at_once=4, draws=96, depth=3)
MANY = ExaminationPlan("test", prompts=2, tokens=8, at_once=4, draws=6_400, depth=3)


def examined(
    transport: httpx2.AsyncBaseTransport,
    plan: ExaminationPlan = PLAN,
    seed: int = 0,
    only: str | None = None,
    tolerance: float = 1e-6,
    seconds: float | None = None,
) -> tuple[Sequence[ClaimVerdict], int, int]:
    """(verdicts, requests told beforehand, requests made)."""

    async def run() -> tuple[Sequence[ClaimVerdict], int, int]:
        async with open_client("http://known", None, transport) as client:
            server, plain = Server(client, "known"), Server(client, "known", extra={"speculation": False})
            context = await prepare(server, plan, plain, tolerance, seed)
            checks = CHECKS if only is None else chosen([only])
            verdicts = [verdict async for verdict in examine(context, checks=checks, seconds=seconds)]
            return (
                verdicts,
                MOST_REQUESTS + sum(cost(context, checks).values()),
                server.requests + plain.requests,
            )

    return asyncio.run(run())


def test_claims_without_a_verdict_in_time_are_not_tried():
    class Slow(KnownLaws):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if b'"stop"' in request.content:
                await asyncio.Event().wait()
            return await super().__call__(request)

    def within(seconds: float | None, only: str) -> Sequence[ClaimVerdict]:
        return examined(httpx2.MockTransport(Slow()), only=only, seconds=seconds)[0]

    assert {verdict.outcome for verdict in within(None, "usage")} == {ClaimStatus.HELD}
    assert {verdict.outcome for verdict in within(0, "usage")} == {ClaimStatus.NOT_TRIED}
    cut = within(1, "stop")[-1]
    assert (cut.check, cut.outcome, cut.detail) == ("stop", ClaimStatus.NOT_TRIED, "no time was left")


def names(verdicts: Sequence[ClaimVerdict], outcome: ClaimStatus) -> set[str]:
    return {verdict.check for verdict in verdicts if verdict.outcome is outcome}


def test_a_correct_server_is_not_refuted_and_costs_what_was_told():
    verdicts, told, made = examined(httpx2.MockTransport(KnownLaws()))
    assert [verdict.check for verdict in verdicts] == [check.name for check in CHECKS]
    assert names(verdicts, ClaimStatus.REFUTED) == set()
    assert names(verdicts, ClaimStatus.NOT_TRIED) == set()
    assert all(verdict.visible for verdict in verdicts)
    assert made <= told


def test_no_law_raises_an_alarm():
    for seed in range(4):
        verdicts, _, _ = examined(
            httpx2.MockTransport(KnownLaws(seed, sharpness=0.3 + 0.4 * seed)), PLAN, seed
        )
        assert names(verdicts, ClaimStatus.REFUTED) == set(), seed


@pytest.mark.slow
def test_none_of_hundreds_of_laws_raises_an_alarm():
    for seed in range(300):
        server = KnownLaws(seed, sharpness=0.2 + 0.01 * seed)
        verdicts, _, _ = examined(httpx2.MockTransport(server), PLAN, seed)
        assert names(verdicts, ClaimStatus.REFUTED) == set(), seed


def test_a_server_that_lacks_a_field_is_not_refuted_for_it():
    class Lacking(KnownLaws):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if b"logprobs" in request.content or b'"n"' in request.content:
                return httpx2.Response(400, json={"error": {"message": "unknown field"}})
            return await super().__call__(request)

    verdicts, _, _ = examined(httpx2.MockTransport(Lacking()))
    assert names(verdicts, ClaimStatus.REFUTED) == set()
    lacking = {"logprobs", "offsets", "n", "penalties", "distribution against own logprobs"}
    assert names(verdicts, ClaimStatus.NOT_TRIED) == lacking


def test_a_server_is_not_asked_for_more_answers_at_once_than_it_has_room_for():
    class Small(KnownLaws):
        room, refused = 128, 0

        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            wanted = json.loads(request.content).get("n", 1) if request.content else 0
            if wanted > self.room:
                self.refused += 1
                return httpx2.Response(429, json={"error": {"message": "busy"}}, headers={"retry-after": "0"})
            self.room -= wanted
            await asyncio.sleep(0)
            try:
                return await super().__call__(request)
            finally:
                self.room += wanted

    server = Small()
    verdicts, _, _ = examined(httpx2.MockTransport(server), replace(FULL, prompts=2, tokens=24, draws=512))
    assert server.refused == 0
    assert names(verdicts, ClaimStatus.NOT_TRIED) == set()


def test_a_server_that_fails_is_refuted_with_the_request_it_failed_on():
    class Failing(KnownLaws):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if b'"stop"' in request.content:
                return httpx2.Response(500, json={"error": {"message": "out of memory"}})
            return await super().__call__(request)

    verdicts, _, _ = examined(httpx2.MockTransport(Failing()), only="stop")
    (stop,) = [verdict for verdict in verdicts if verdict.outcome is ClaimStatus.REFUTED]
    assert stop.check == "stop"
    assert "out of memory" in stop.detail
    assert stop.reproduction is not None
    assert stop.reproduction.bodies[0]["stop"]


def test_a_penalty_that_is_on_by_default_refutes_nothing():
    verdicts, _, _ = examined(httpx2.MockTransport(KnownLaws(repeat_penalty=1.1)))
    assert names(verdicts, ClaimStatus.REFUTED) == set()
    assert names(verdicts, ClaimStatus.NOT_TRIED) == set()


def test_a_strict_server_gets_the_filters_that_it_takes_and_no_others():
    class Strict(KnownLaws):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if b"mirostat" in request.content or b"repetition_penalty" in request.content:
                return httpx2.Response(400, json={"error": {"message": "unknown field"}})
            return await super().__call__(request)

    verdicts, told, made = examined(httpx2.MockTransport(Strict(repeat_penalty=1.1)))
    assert names(verdicts, ClaimStatus.REFUTED) == set()
    assert names(verdicts, ClaimStatus.NOT_TRIED) == set()
    assert made <= told


def test_a_server_that_fails_at_an_optional_field_is_examined_without_it():
    class Failing(KnownLaws):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if b'"logprobs"' in request.content:
                return httpx2.Response(500, json={"error": {"message": "logits_all is off"}})
            return await super().__call__(request)

    verdicts, _, _ = examined(httpx2.MockTransport(Failing()), only="logprobs")
    assert names(verdicts, ClaimStatus.NOT_TRIED) == {"logprobs"}


@pytest.mark.parametrize("plan", [SMALL, STANDARD, FULL], ids=lambda plan: plan.name)
def test_every_form_compares_texts_beyond_a_late_change(plan):
    claim = "greedy with and without speculation"
    server = httpx2.MockTransport(ChangesTexts(sharpness=0.8))
    verdicts, _, _ = examined(server, replace(plan, prompts=3), only=claim)
    assert names(verdicts, ClaimStatus.REFUTED) == {claim}
    found = verdicts[-1]
    assert "from token 45 on" in found.detail
    assert found.reproduction is not None
    assert found.reproduction.got.removeprefix("with: ") != found.reproduction.expected.removeprefix(
        "without: "
    )
    assert plan.tokens >= 128


@pytest.mark.parametrize(
    ("tolerance", "outcome"), [(5.0, ClaimStatus.DIFFERS_AT_TIES), (0.0, ClaimStatus.REFUTED)]
)
def test_texts_that_part_at_near_ties_are_not_said_to_hold(tolerance, outcome):
    claim = "greedy with and without speculation"
    server = httpx2.MockTransport(ChangesTexts(sharpness=0.8))
    verdicts, _, _ = examined(server, replace(SMALL, prompts=2), only=claim, tolerance=tolerance)
    assert verdicts[-1].outcome is outcome
    assert verdicts[-1].reproduction is not None


def test_every_verdict_has_the_prompts_and_tokens_that_it_judged():
    verdicts, _, _ = examined(httpx2.MockTransport(KnownLaws()))
    extents = {verdict.check: verdict.extent for verdict in verdicts}
    for name, extent in extents.items():
        assert len(extent.prompts) == (1 if name == "logit_bias" else PLAN.prompts), name
        assert extent.fewest is not None
        assert 1 <= extent.fewest <= extent.tokens <= PLAN.tokens + 8, name
    assert str(extents["distribution against own logprobs"]).startswith("2 × ")
    assert {verdict.words for verdict in verdicts if verdict.check == "seed alone"} == {"held in 4"}
    assert all("held" in verdict.words or "not refuted" in verdict.words for verdict in verdicts)


def test_streams_cut_by_another_request_fail_under_concurrency_with_the_requests_that_show_it():
    verdicts, _, _ = examined(httpx2.MockTransport(CutsStreams()))
    assert names(verdicts, ClaimStatus.REFUTED) == set()
    (failing,) = [verdict for verdict in verdicts if verdict.outcome is ClaimStatus.FAILS_TOGETHER]
    assert failing.check == "seed in a batch"
    shown = failing.reproduction
    assert shown is not None
    assert shown.at_once
    assert [bool(body.get("stream")) for body in shown.bodies] == [True, False]
    assert "finish_reason" in shown.got
    assert len(failing.extent.prompts) == 1
    assert failing.extent.tokens > 1


def test_draws_are_made_one_at_a_time_where_requests_fail_under_concurrency():
    class OneAtATime(KnownLaws):
        running = 0

        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            self.running += 1
            try:
                response = await super().__call__(request)
                crowded = self.running > 1
            finally:
                self.running -= 1
            return httpx2.Response(500, json={"error": {"message": "crowded"}}) if crowded else response

    verdicts, _, _ = examined(httpx2.MockTransport(OneAtATime()))
    assert names(verdicts, ClaimStatus.FAILS_TOGETHER) == {"seed in a batch"}
    assert names(verdicts, ClaimStatus.REFUTED) == set()
    alone, _, _ = examined(httpx2.MockTransport(OneAtATime()), only="distribution against own logprobs")
    assert names(alone, ClaimStatus.FAILS_TOGETHER) == {"distribution against own logprobs"}


def test_a_stream_that_breaks_off_alone_too_is_no_matter_of_concurrency():
    class NeverSaysWhy(KnownLaws):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            response = await super().__call__(request)
            if b'"stream":true' not in request.content:
                return response
            return httpx2.Response(
                200, content=response.content.replace(b'"length"', b"null").replace(b'"stop"', b"null")
            )

    verdicts, _, _ = examined(httpx2.MockTransport(NeverSaysWhy()))
    assert names(verdicts, ClaimStatus.FAILS_TOGETHER) == set()
    assert "streamed equals whole" in names(verdicts, ClaimStatus.REFUTED)


def test_draws_do_not_rest_on_n_where_each_takes_a_request_of_its_own():
    class OneAnswer(KnownLaws):
        async def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if request.method == "GET":
                return await super().__call__(request)
            body = {**json.loads(request.content), "n": 1}
            return await super().__call__(httpx2.Request("POST", request.url, json=body))

    verdicts, _, _ = examined(httpx2.MockTransport(OneAnswer()))
    assert names(verdicts, ClaimStatus.REFUTED) == {"n"}
    assert names(verdicts, ClaimStatus.NOT_TRIED) == set()


def test_an_unknown_claim_is_refused_by_name():
    with pytest.raises(RequestError, match="no claim 'speed'"):
        chosen(["speed"])


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_refuted_by_its_name(name):
    fault = FAULTS[name]
    flat = KnownLaws(
        sharpness=0.2
    )  # the less likely the likeliest token, the fewer draws show a bias towards it
    transport = FaultyProxy(
        httpx2.MockTransport(flat if "own logprobs" in fault.refutes else KnownLaws()), fault
    )
    many = MANY if "own logprobs" in fault.refutes else replace(MANY, draws=1_600)
    needs_many = "distribution" in fault.refutes
    verdicts, _, _ = examined(transport, *((many, 0, fault.refutes) if needs_many else ()))
    refuted = names(verdicts, ClaimStatus.REFUTED)
    assert fault.refutes in refuted
    assert refuted <= {fault.refutes, *fault.also}
    (shown,) = [verdict.reproduction for verdict in verdicts if verdict.check == fault.refutes]
    assert shown is not None
    assert shown.got != shown.expected
    assert all(body["max_tokens"] <= 24 + 8 for body in shown.bodies)
