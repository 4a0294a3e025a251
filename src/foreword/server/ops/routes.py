"""Routes for operators: health, readiness, metrics."""

from dataclasses import asdict
from time import monotonic
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from foreword import __version__
from foreword.control.reporting.figures import ControlReport
from foreword.control.reporting.reading import as_json
from foreword.engine.messages import EngineStats
from foreword.engine.outputs import sum_stats
from foreword.server.api.entry import json_answer
from foreword.server.api.identity import caller_of
from foreword.server.api.types.answer_types import speculation_of
from foreword.server.context import ServerContext
from foreword.wire.client import EngineState


def ops_routes(context: ServerContext) -> APIRouter:
    """What watches over the server."""
    router = APIRouter()

    @router.get("/version")
    async def version() -> Response:
        """As vLLM has it."""
        return json_answer({"version": __version__})

    @router.get("/health")
    async def health(request: Request) -> Response:
        """How the server is doing; 200 as long as it answers at all."""
        return json_answer(await _health(context, caller_of(request).trusted))

    @router.get("/ready")
    async def ready() -> Response:
        """200 if a request would be taken now, else 503."""
        state = context.engine.state
        return json_answer({"status": state.value}, 200 if state is EngineState.READY else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        await _refresh(context)
        return Response(context.metrics.page(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return router


async def _health(context: ServerContext, trusted: bool) -> dict[str, Any]:
    """The state for everybody; figures only for those who may use the server, since they tell of others' texts."""
    state = context.engine.state
    told: dict[str, Any] = {"status": "ok" if state is EngineState.READY else state.value}
    if not trusted:
        return told
    told |= {
        "model": context.settings.model_name,
        "uptime_seconds": round(monotonic() - context.started, 3),
        "engine_restarts": context.engine.restarts,
        "in_flight": context.admission.in_flight,
    }
    stats = await context.engine.stats()
    if stats is not None:
        told["engine"] = _engine_figures(stats)
        if stats.control is not None and context.settings.show_speculation:
            told["usage"] = _usage_figures(stats.control)
        if stats.draft_nodes and context.settings.show_speculation:
            told["draft_nodes"] = [asdict(node) for node in stats.draft_nodes]
    if context.settings.show_speculation:
        told["speculation"] = _speculation_figures(context)
    return told


def _engine_figures(stats: EngineStats) -> dict[str, Any]:
    return {
        "running": stats.running,
        "waiting": stats.waiting,
        "kv_usage": stats.kv_usage,
        "kv_pages": stats.kv_pages,
        "kv_pages_used": stats.kv_pages_used,
        "prefix_queries": stats.prefix_queries,
        "prefix_hits": stats.prefix_hits,
        "preemptions": stats.preemptions,
        "steps": stats.steps,
        "drafter_memory_bytes": stats.drafter_memory_bytes,
    }


def _usage_figures(report: ControlReport) -> dict[str, Any]:
    """How busy the devices were, what that costs, and the pages held for guesses."""
    return {**as_json(report)["usage"], "provisional_pages": report.provisional_pages}


def _speculation_figures(context: ServerContext) -> dict[str, Any]:
    """Of all answers that have ended, however; the whole is the sum of the cohorts.

    Its method is the server's own, from the start; the cohorts tell who drafted for those that asked for another.
    """
    cohorts = context.metrics.totals
    total = sum_stats((0, stats) for stats in cohorts.values())
    figures = {name: msgspec.structs.asdict(speculation_of(stats)) for name, stats in cohorts.items()}
    return msgspec.structs.asdict(speculation_of(total)) | {
        "method": context.settings.default_method or "",
        "enabled": context.engine.speculating,
        "cohorts": figures,
    }


async def _refresh(context: ServerContext) -> None:
    metrics = context.metrics
    metrics.in_flight.set(context.admission.in_flight)
    metrics.ready.set(context.engine.state is EngineState.READY)
    metrics.restarts.set(context.engine.restarts)
    if (stats := await context.engine.stats()) is not None:
        metrics.note_engine(stats, context.engine.restarts)
