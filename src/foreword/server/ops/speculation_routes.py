"""Routes about guessing: how it stands, what is in its way, and the operator's switches."""

from dataclasses import asdict
from pathlib import Path

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foreword.control.policy_file.document import OTHER, Stage
from foreword.control.policy_file.parsing import read_policy
from foreword.control.reporting.advising import advise
from foreword.control.reporting.figures import ControlReport
from foreword.control.reporting.reading import as_json
from foreword.errors import EngineUnavailable, RequestError
from foreword.server.api.entry import body_of, json_answer, takes
from foreword.server.api.identity import caller_of
from foreword.server.api.types.sampling_types import StrictBody
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError


class SwitchRequest(StrictBody):
    """`POST /speculation`: the switch for everybody, or where one drafter stands in one cohort."""

    enabled: bool | None = None
    drafter: str | None = Field(None, max_length=256)
    cohort: str | None = Field(None, max_length=256)
    state: str | None = Field(None, max_length=16)


def speculation_routes(context: ServerContext) -> APIRouter:
    """The report where it is not hidden, and the switches where they were asked for."""
    router = APIRouter()
    if context.settings.show_speculation:
        _add_report(router, context)
    if context.settings.allow_switch:
        _add_switch(router, context)
    return router


def _add_report(router: APIRouter, context: ServerContext) -> None:
    @router.get("/speculation")
    async def speculation() -> Response:
        """By drafter and cohort: state, gain, depth, acceptance, cost, last decisions."""
        return json_answer(as_json(await _report(context)))

    @router.get("/advise")
    async def advice() -> Response:
        """What is in the way of a gain, and what to change."""
        return json_answer({"advice": [asdict(one) for one in advise(await _report(context))]})


async def _report(context: ServerContext) -> ControlReport:
    stats = await context.engine.stats()
    if stats is None or stats.control is None:
        raise EngineUnavailable("the engine does not say how guessing stands; try again")
    return stats.control


def _add_switch(router: APIRouter, context: ServerContext) -> None:
    @router.post("/speculation", openapi_extra=takes(SwitchRequest))
    async def switch(request: Request) -> Response:
        """Turn guessing on or off for everybody, or move one drafter in one cohort; no text changes."""
        _check_admin(context, request)
        body = await body_of(context, request, SwitchRequest, is_strict=True)
        if body.enabled is not None and body.state is None:
            context.engine.speculate(body.enabled)
            return json_answer({"enabled": body.enabled})
        if body.enabled is None and body.drafter and body.cohort and body.state:
            _check_pair(context.settings.policy_file, body.drafter, body.cohort, body.state)
            context.engine.move_pair(body.drafter, body.cohort, body.state)
            return json_answer({"drafter": body.drafter, "cohort": body.cohort, "state": body.state})
        raise ApiError(400, "give either enabled, or drafter, cohort and state", param="enabled")


def _check_admin(context: ServerContext, request: Request) -> None:
    """One tenant must not decide for all of them; without keys there are no tenants."""
    if context.settings.has_keys and not caller_of(request).is_admin:
        raise ApiError(
            403,
            "speculation is switched for all tenants: this needs an admin key, which the server gets by --admin-key",
            code="admin_key_required",
        )


def _check_pair(path: str | None, drafter: str, cohort: str, state: str) -> None:
    """Names are those of the file as it is now, which the engine has read too."""
    if path is None:
        raise ApiError(400, "this server has no policy file: --speculation-policy", param="cohort")
    try:
        policy = read_policy(Path(path))
    except RequestError as error:
        raise ApiError(400, str(error), param="cohort") from None
    if drafter not in policy.drafters:
        raise ApiError(400, f"the policy file names no drafter {drafter!r}", param="drafter")
    if cohort != OTHER and cohort not in [rule.name for rule in policy.cohorts]:
        raise ApiError(400, f"the policy file names no cohort {cohort!r}", param="cohort")
    if state not in ("next", *Stage):
        raise ApiError(400, f"state must be next, {', '.join(Stage)}, not {state!r}", param="state")
