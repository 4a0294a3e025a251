"""Routes for operators: health, readiness, metrics, the speculation report and its switches."""

from dataclasses import asdict
from pathlib import Path
from time import monotonic
from typing import Any

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.control.policy_file.document import OTHER, Stage
from foreword.control.policy_file.parsing import read_policy
from foreword.control.reporting.advising import advise
from foreword.control.reporting.figures import ControlReport
from foreword.control.reporting.reading import as_json
from foreword.engine.outputs import sum_stats
from foreword.errors import EngineUnavailable, RequestError
from foreword.server.api.answer_types import speculation_of
from foreword.server.api.entry import body_of, body_schema, json_answer
from foreword.server.api.sampling_types import StrictBody
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError
from foreword.server.middleware import caller_of
from foreword.wire.supervisor import EngineState

_ENGINE_FIGURES = (
    *("running", "waiting", "kv_usage", "kv_pages", "kv_pages_used", "prefix_queries", "prefix_hits"),
    *("preemptions", "steps", "drafter_memory_bytes"),
    *("states", "states_used", "state_checkpoints", "state_hits", "state_evictions"),
    *("kernels_loaded", "kernels_pending", "passes_captured", "passes_eager", "passes_cold"),
)
"""Fields of `EngineStats` shown by `/health`."""

_LEARNING_FIGURES = ("state", "reason", "version", "texts", "tokens", "new_tokens", "wanted_tokens")
"""Fields of `LearningReport` shown by `/health`."""


def ops_routes(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.get("/version")
    async def version() -> Response:
        """Return the version, as in vLLM."""
        return json_answer({"version": __version__})

    @router.get("/health")
    async def health(request: Request) -> Response:
        """Return the server's state; always 200."""
        return json_answer(await _health(context, caller_of(request).trusted))

    @router.get("/ready")
    async def ready() -> Response:
        """Return 200 if requests are accepted now, otherwise 503."""
        state = context.engine.state
        return json_answer({"status": state.value}, 200 if state is EngineState.READY else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics for Prometheus."""
        await _refresh(context)
        return Response(context.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _health(context: ServerContext, trusted: bool) -> dict[str, Any]:
    """Return the server's state; for trusted callers also figures, which depend on the texts of other clients."""
    state = context.engine.state
    reported: dict[str, Any] = {"status": "ok" if state is EngineState.READY else state.value}
    if not trusted:
        return reported
    reported |= {
        "model": context.settings.model_name,
        "uptime_seconds": round(monotonic() - context.started, 3),
        "engine_restarts": context.engine.restarts,
        "in_flight": context.admission.in_flight,
    }
    stats = await context.engine.stats()
    if stats is not None:
        reported["engine"] = {name: getattr(stats, name) for name in _ENGINE_FIGURES}
        if stats.learning is not None and context.settings.show_speculation:
            reported["learning"] = {name: getattr(stats.learning, name) for name in _LEARNING_FIGURES}
        if stats.control is not None and context.settings.show_speculation:
            pages = {"provisional_pages": stats.control.provisional_pages}
            reported["usage"] = as_json(stats.control)["usage"] | pages
        if stats.draft_nodes and context.settings.show_speculation:
            reported["draft_nodes"] = [asdict(node) for node in stats.draft_nodes]
    if context.settings.show_speculation:
        reported["speculation"] = _speculation_figures(context)
    return reported


def _speculation_figures(context: ServerContext) -> dict[str, Any]:
    """Return figures over all ended answers, in total and by cohort.

    The total's `method` is the server's default drafter; a cohort's is the drafter that was used.
    """
    cohorts = context.metrics.totals
    total = sum_stats((0, stats) for stats in cohorts.values())
    figures = {name: speculation_of(stats) for name, stats in cohorts.items()}
    return speculation_of(total) | {
        "method": context.settings.default_method or "",
        "enabled": context.engine.speculating,
        "cohorts": figures,
    }


async def _refresh(context: ServerContext) -> None:
    """Update the metrics that are read from the server's and the engine's state."""
    metrics = context.metrics
    metrics.set("num_requests_in_flight", context.admission.in_flight)
    metrics.set("engine_ready", context.engine.state is EngineState.READY)
    metrics.set("engine_restarts", context.engine.restarts)
    if (stats := await context.engine.stats()) is not None:
        metrics.note_engine(stats, context.engine.restarts)


class SwitchRequest(StrictBody):
    """Body of `POST /speculation`: either `enabled`, for the whole engine, or the other three fields."""

    enabled: bool | None = None
    drafter: str | None = Field(None, max_length=256)
    cohort: str | None = Field(None, max_length=256)
    state: str | None = Field(None, max_length=16)  # the roll-out stage to move to, or "next"


def speculation_routes(context: ServerContext) -> APIRouter:
    """Return the routes that report and switch speculation, as far as the settings enable them."""
    router = APIRouter()

    async def speculation() -> Response:
        """Return state, gain, depth, acceptance, cost and recent decisions by drafter and cohort."""
        return json_answer(as_json(await _report(context)))

    async def advice() -> Response:
        """Return what limits the gain of speculation, and what to change."""
        return json_answer({"advice": advise(await _report(context))})

    async def switch(request: Request) -> Response:
        """Switch speculation for all requests, or move a drafter in a cohort to another roll-out stage."""
        check_admin(context, request)
        body = await body_of(context, request, SwitchRequest, is_strict=True)
        if body.enabled is not None and body.state is None:
            context.engine.speculate(body.enabled)
            return json_answer({"enabled": body.enabled})
        if body.enabled is None and body.drafter and body.cohort and body.state:
            _check_pair(context.settings.policy_file, body.drafter, body.cohort, body.state)
            context.engine.move_pair(body.drafter, body.cohort, body.state)
            return json_answer({"drafter": body.drafter, "cohort": body.cohort, "state": body.state})
        raise ApiError(400, "give either enabled, or drafter, cohort and state", param="enabled")

    if context.settings.show_speculation:
        router.get("/speculation")(speculation)
        router.get("/advise")(advice)
    if context.settings.allow_switch:
        router.post("/speculation", openapi_extra=body_schema(SwitchRequest))(switch)
    return router


async def _report(context: ServerContext) -> ControlReport:
    stats = await context.engine.stats()
    if stats is None or stats.control is None:
        raise EngineUnavailable("the engine did not report its speculation figures; try again")
    return stats.control


def check_admin(context: ServerContext, request: Request) -> None:
    """Raise 403 without an admin key: the request affects other tenants. A server without keys has no tenants."""
    if context.settings.has_keys and not caller_of(request).is_admin:
        raise ApiError(
            403,
            "this affects other tenants and needs an admin key; the server takes one with --admin-key",
            code="admin_key_required",
        )


def _check_pair(path: str | None, drafter: str, cohort: str, state: str) -> None:
    """Raise 400 for a drafter or cohort that is not in the policy file, or for an unknown state."""
    if path is None:
        raise ApiError(
            400, "this server has no policy file; start it with --speculation-policy", param="cohort"
        )
    try:
        policy = read_policy(Path(path))
    except RequestError as error:
        raise ApiError(400, str(error), param="cohort") from None
    if drafter not in policy.drafters:
        raise ApiError(400, f"the policy file has no drafter {drafter!r}", param="drafter")
    if cohort != OTHER and cohort not in [rule.name for rule in policy.cohorts]:
        raise ApiError(400, f"the policy file has no cohort {cohort!r}", param="cohort")
    if state not in ("next", *Stage):
        raise ApiError(400, f"state must be next, {', '.join(Stage)}, not {state!r}", param="state")
