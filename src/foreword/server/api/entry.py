"""Common steps of all generating requests: read, check, admit, tokenize, answer."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import NewRequest
from foreword.errors import EngineUnavailable, RequestError
from foreword.server.api.answer_types import Dialect
from foreword.server.api.answering import AnswerJob, respond
from foreword.server.api.bodies import UnknownFields, checked_body, parse_body, read_body
from foreword.server.api.prompts import room_for_answer
from foreword.server.api.sampling_types import SamplingFields, StrictBody
from foreword.server.context import ServerContext
from foreword.server.errors import ApiError
from foreword.server.middleware import ApiCaller, caller_of
from foreword.structured.params import FORMAT_PARAM
from foreword.wire.supervisor import EngineState


async def new_request(
    context: ServerContext,
    body: SamplingFields,
    caller: ApiCaller,
    request_id: str,
    ids: Sequence[int],
    refine: Callable[[SamplingParams], SamplingParams] = lambda params: params,
    *,
    progress: bool = False,
) -> NewRequest:
    """Return the engine's request for a tokenized prompt; `refine` adapts the sampling parameters for the route."""
    settings, max_model_len = context.settings, context.engine.max_model_len
    if max_model_len is None:
        raise EngineUnavailable("the engine is still starting; try again")
    room = room_for_answer(ids, body, max_model_len, settings.limits.prompt_tokens)
    if body.wanted_tokens is None:
        room = min(body.default_tokens or room, room)
    adapter = context.adapter(body.model)
    return NewRequest(
        request_id,
        tuple(ids),
        refine(body.sampling_params(room, settings.sampling)),
        caller.tenant,
        context.speculation(body.speculation_setting),
        progress,
        await context.prompts.prediction(body.expected_answer, max_model_len),
        body.labels(settings.model_name, adapter),
        body.priority if isinstance(body.priority, int) else 0,  # a text is only for the policy file
        body.deadline_ms,
        adapter,
        body.on_deadline or "end",
    )


def field_error(error: RequestError, body: SamplingFields) -> ApiError:
    """Return the API error with the field at fault; for an invalid response format, the field that set it."""
    message, field = str(error), error.param
    if field == FORMAT_PARAM and (given := body.format_field()) is not None:
        return ApiError(400, f"{given}: {message.removeprefix('structured outputs: ')}", param=given)
    return ApiError(400, message, param=field if field in type(body).model_fields else None)


Body = TypeVar("Body", bound=StrictBody)
AnyBody = TypeVar("AnyBody", bound=SamplingFields)
Result = TypeVar("Result")


@dataclass(frozen=True)
class AnswerRoute(Generic[AnyBody]):
    """Body type and preparation of the requests of one route."""

    model: type[AnyBody]
    prepare: Callable[[ServerContext, AnyBody, ApiCaller], Awaitable[AnswerJob]]  # tokenizes the prompts


@dataclass(frozen=True)
class Conversion:
    """A request of another API, converted to OpenAI's."""

    route: AnswerRoute[Any]
    body: dict[str, Any]
    field_names: Mapping[str, str]  # path of OpenAI's field -> path of the other API's
    make_dialect: Callable[[AnswerJob], Dialect]  # formats the answers for the other API


async def answer_request(context: ServerContext, request: Request, route: AnswerRoute[AnyBody]) -> Response:
    """Answer a request of OpenAI's API or of `/generate`."""
    data = await read_body(request, context.settings.limits)
    context.admission.check(1)
    body = await _read(context, request, data, route.model)
    return await _answer(context, request, route, body, lambda job: job.dialect)


async def answer_converted(
    context: ServerContext, request: Request, convert: Callable[[dict[str, Any]], Conversion | dict[str, Any]]
) -> Response:
    """Answer a request of another API; errors name that API's fields.

    `convert` returns a `Conversion`, or the response if it does not need the engine.
    """
    limits = context.settings.limits
    data = await read_body(request, limits)
    context.admission.check(1)
    converted = await parse_body(data, limits, convert)
    if isinstance(converted, dict):
        context.check_model(model := converted.get("model"))
        return json_answer(converted | {"model": model or context.settings.model_name})
    try:
        body = _checked(context, request, converted.body, converted.route.model)
        if body.n not in (None, 1):
            raise ApiError(400, "n: this API has one answer per request; leave n out", param="n")
        return await _answer(context, request, converted.route, body, converted.make_dialect)
    except ApiError as error:
        raise error.renamed(converted.field_names) from None


async def use_converted(
    context: ServerContext,
    request: Request,
    convert: Callable[[dict[str, Any]], Conversion],
    use: Callable[[Any], Awaitable[Result]],
) -> Result:
    """Return the result of `use` for the converted body of a request that does not need the engine."""
    limits = context.settings.limits
    converted = await parse_body(await read_body(request, limits), limits, convert)
    try:
        body = _checked(context, request, converted.body, converted.route.model)
        try:
            return await use(body)
        except RequestError as error:
            raise field_error(error, body) from None
    except ApiError as error:
        raise error.renamed(converted.field_names) from None


async def _answer(
    context: ServerContext,
    request: Request,
    route: AnswerRoute[AnyBody],
    body: AnyBody,
    make_dialect: Callable[[AnswerJob], Dialect],
) -> Response:
    """Admit and answer a validated request; `make_dialect` returns the format of the answers."""
    answers = body.check(context.settings.limits)
    if context.engine.state in (EngineState.STARTING, EngineState.RESTARTING, EngineState.STOPPED):
        raise EngineUnavailable(f"the engine is {context.engine.state}; try again")
    try:
        with ExitStack() as admission:
            admission.enter_context(context.admission.admit(answers))
            job = await route.prepare(context, body, caller_of(request))
            return await respond(context, request, replace(job, dialect=make_dialect(job)), admission)
    except RequestError as error:
        raise field_error(error, body) from None


async def body_of(
    context: ServerContext, request: Request, model: type[Body], *, is_strict: bool = False
) -> Body:
    """Read the body of a request that does not need the engine; with `is_strict`, unknown fields are refused."""
    data = await read_body(request, context.settings.limits)
    return await _read(context, request, data, model, is_strict)


async def _read(
    context: ServerContext, request: Request, data: bytes, model: type[Body], is_strict: bool = False
) -> Body:
    """Parse and validate a body."""
    limits = context.settings.limits
    return await parse_body(data, limits, lambda value: _checked(context, request, value, model, is_strict))


def _checked(
    context: ServerContext,
    request: Request,
    value: dict[str, Any],
    model: type[Body],
    is_strict: bool = False,
) -> Body:
    """Validate a body. The headers of the response, also of an error, name the ignored fields."""
    unknown = UnknownFields(is_strict or context.settings.strict_fields)
    try:
        body = checked_body(value, model, unknown)
    finally:
        request.state.ignored_fields = context.ignored_fields.header(unknown)
    context.check_model(getattr(body, "model", None))
    return body


def refusing_handler(path: str, instead: str) -> Callable[[], Awaitable[Response]]:
    """Return a handler that responds with status 501; `instead` is the reason or an alternative."""

    async def refuse() -> Response:
        raise ApiError(501, f"{path} is not implemented: {instead}", code="not_implemented")

    return refuse


def json_answer(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def body_schema(model: type[BaseModel]) -> dict[str, Any]:
    """Return the OpenAPI schema of a body, which is parsed here and not by FastAPI."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": _inlined(schema)}}}}


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with its definitions inlined."""
    definitions = schema.pop("$defs", {})

    def resolve(value: Any) -> Any:  # noqa: ANN401 - any JSON
        if isinstance(value, dict):
            if "$ref" in value:
                return resolve(definitions[value["$ref"].rsplit("/", 1)[1]])
            return {key: resolve(entry) for key, entry in value.items()}
        return [resolve(entry) for entry in value] if isinstance(value, list) else value

    resolved: dict[str, Any] = resolve(schema)
    return resolved
