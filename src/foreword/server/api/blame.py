"""Which field of a body an engine's refusal is about."""

from foreword.errors import RequestError
from foreword.server.api.types.sampling_types import SamplingFields
from foreword.server.errors import ApiError
from foreword.structured.params import FORM_PARAM


def blamed(error: RequestError, body: SamplingFields) -> ApiError:
    """Return the refusal with the field that it names; of a response format, the one that the client used for it."""
    message, field = str(error), error.param
    if field == FORM_PARAM and (given := body.form_field()) is not None:
        return ApiError(400, f"{given}: {message.removeprefix('structured outputs: ')}", param=given)
    return ApiError(400, message, param=field if field in type(body).model_fields else None)
