"""Routes of a head that is trained on served texts: report, rollback, and deletion of a tenant's texts."""

from dataclasses import asdict

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from foreword.engine.learning import LearningReport
from foreword.errors import EngineUnavailable
from foreword.server.api.entry import body_of, body_schema, json_answer
from foreword.server.api.sampling_types import StrictBody
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError
from foreword.server.middleware import caller_of
from foreword.server.ops_routes import check_admin
from foreword.server.settings import is_tenant

OWN, KEYLESS = "me", "none"
"""Names of the caller's own tenant, and of the tenant of all requests without an API key."""


class LearnRequest(StrictBody):
    """Body of `POST /learn`."""

    action: str = Field(max_length=16)  # "rollback"


def learn_routes(context: ServerContext) -> APIRouter:
    """Return the routes; without a learner in the engine, they answer 404."""
    router = APIRouter()

    async def learning() -> Response:
        """Return kept texts, trainings, and the versions of the head with their tokens per pass."""
        return json_answer(asdict(await _report(context)))

    @router.post("/learn", openapi_extra=body_schema(LearnRequest))
    async def act(request: Request) -> Response:
        """Roll back to the version of the head before the one in use."""
        check_admin(context, request)
        body = await body_of(context, request, LearnRequest, is_strict=True)
        if body.action != "rollback":
            raise ApiError(400, f"action must be rollback, not {body.action!r}", param="action")
        await _report(context)
        context.engine.learn(body.action)
        return json_answer({"action": body.action}, 202)

    @router.delete("/learn/tenants/{tenant}")
    async def forget(request: Request, tenant: str) -> Response:
        """Delete a tenant's texts and all versions of the head trained on them.

        `me` is the caller's tenant, `none` that of requests without an API key.
        """
        name = _forgettable(context, request, tenant)
        await _report(context)
        context.engine.learn("forget", name)
        return json_answer({"action": "forget", "tenant": name}, 202)

    if context.settings.show_speculation:
        router.get("/learn")(learning)
    return router


async def _report(context: ServerContext) -> LearningReport:
    """Return the learner's report; raise 404 without a learner."""
    stats = await context.engine.stats()
    if stats is None:
        raise EngineUnavailable("the engine did not report its training; try again")
    if stats.learning is None:
        raise ApiError(404, "this server does not train its head; start it with --learn")
    return stats.learning


def _forgettable(context: ServerContext, request: Request, tenant: str) -> str:
    """Return the tenant to forget; raise `ApiError` unless it is the caller's own or the caller may name others."""
    own = caller_of(request).tenant  # empty: the caller has no key, and shares a tenant with all such callers
    name = {OWN: own, KEYLESS: ""}.get(tenant, tenant)
    if not own or name != own:
        check_admin(context, request)
    if name and not is_tenant(name):
        raise ApiError(
            400, f"a tenant is {OWN}, {KEYLESS}, or 32 digits from `foreword policy tenant`", param="tenant"
        )
    return name
