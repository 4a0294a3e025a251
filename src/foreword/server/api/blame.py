"""Which field of a body an engine's refusal is about."""

import re

from foreword.errors import RequestError
from foreword.server.api.types.sampling_types import SamplingFields
from foreword.server.errors import ApiError

_FORM = "structured outputs: "
_FIRST_WORD = re.compile(r"\w+")


def blamed(error: RequestError, body: SamplingFields) -> ApiError:
    """The refusal with the field that it begins with; of a form, with the one that the client prescribed it in."""
    message = str(error)
    field = body.form_field() if message.startswith(_FORM) else None
    if field is not None:
        return ApiError(400, f"{field}: {message.removeprefix(_FORM)}", param=field)
    first = _FIRST_WORD.match(message)
    named = first[0] if first is not None and first[0] in type(body).model_fields else None
    return ApiError(400, message, param=named)
