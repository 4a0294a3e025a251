"""What a client reads when a body does not fit: plain words, and a hint where a field has another name here."""

import json

import pytest

from foreword.server.api.bodies import UnknownFields, checked_body, load_object
from foreword.server.api.request_types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerateRequest,
    ResponsesRequest,
    TokenizeRequest,
)
from foreword.server.errors import ApiError
from foreword.server.settings import Limits

MESSAGE = {"role": "user", "content": "x"}
BODIES = {
    CompletionRequest: {"prompt": "x"},
    ChatRequest: {"messages": [MESSAGE]},
    GenerateRequest: {"prompt": "x"},
    TokenizeRequest: {"prompt": "x"},
    DetokenizeRequest: {"tokens": [1]},
    ResponsesRequest: {"input": "x"},
}
VALUES = (
    5, -1, 1.5, 3e9, "", "x", "x" * 5000, True, None, [], ["x"], [1], [-1], [1.5], [None], [[1], ["x"]],
    {}, {"a": 1}, {"a": [1]}, {"1": 500}, {"type": "content"}, {"type": "content", "content": 5},
    {"include_usage": 5}, [{"role": "user"}], [{"role": "x", "content": "a"}], [MESSAGE | {"zz": 1}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": "a", "zz": 1}]}],
)  # fmt: skip


def complaint(model: type, body: dict, is_strict: bool = True) -> ApiError | None:
    try:
        checked_body(load_object(json.dumps(body).encode(), Limits()), model, UnknownFields(is_strict))
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("model", BODIES)
def test_no_complaint_is_in_the_validation_librarys_words(model: type):
    found = [
        complaint(model, BODIES[model] | {field: value}) for field in model.model_fields for value in VALUES
    ]
    told = [str(error) for error in (*found, complaint(model, {})) if error is not None]
    assert len(told) > len(model.model_fields)
    for line in told:
        assert not any(
            word in line for word in ("nput should", "valid ", "ermitted", "Field required", "Value")
        ), line
        assert "\n" not in line
    # A union's branches have names of the library's own.
    places = {error.param for error in found if error is not None}
    assert not any(
        part in ("str", "bool") or "[" in part or "constrained" in part
        for place in places
        for part in (place or "").split(".")
    )


@pytest.mark.parametrize(
    ("model", "body", "told"),
    [
        (ChatRequest, {}, "messages: is missing"),
        (ChatRequest, {"messages": []}, "messages: must not be empty"),
        (ChatRequest, {"messages": [MESSAGE], "top_p": 5}, "top_p: must be at most 1"),
        (ChatRequest, {"messages": [MESSAGE], "n": 1.5}, "n: must be a whole number"),
        (ChatRequest, {"messages": [MESSAGE], "stream": "yes"}, "stream: must be true or false"),
        (GenerateRequest, {"prompt": 5}, "prompt: must be a text or a list of token ids"),
        (GenerateRequest, {"prompt": []}, "prompt: must not be empty"),
        (CompletionRequest, {"prompt": "x", "stop": [""]}, "stop.0: must not be empty"),
        (CompletionRequest, {"prompt": "x", "stop": 5}, "stop: must be a text or a list of texts"),
        (ChatRequest, {"messages": [MESSAGE], "logit_bias": {"-1": 5}}, "logit_bias: keys must be token ids"),
        (ChatRequest, {"messages": [MESSAGE], "logit_bias": {"1": 101}}, "logit_bias: values must be in -100 .. 100"),
        (ChatRequest, {"messages": [MESSAGE], "priority": 2**31},
         "priority: must be a whole number of 32 bits, or a text of at most 64 characters"),
    ],
)  # fmt: skip
def test_complaints(model: type, body: dict, told: str):
    error = complaint(model, body)
    assert str(error) == told
    assert error.param == told.partition(":")[0]


@pytest.mark.parametrize(
    ("model", "field", "told"),
    [
        (CompletionRequest, "speculative", "did you mean speculation?"),
        (CompletionRequest, "speculative_config", "did you mean speculation?"),
        (ChatRequest, "temprature", "did you mean temperature?"),
        (GenerateRequest, "n_predict", "did you mean max_tokens?"),
        (DetokenizeRequest, "ids", "did you mean tokens?"),
        (TokenizeRequest, "n_predict", "leave it out"),
        (ChatRequest, "x" * 1000, "leave it out"),
        (ChatRequest, "choice", "did you mean guided_choice?"),
        (ResponsesRequest, "max_tokens", "did you mean max_output_tokens?"),
        (ResponsesRequest, "response_format", "did you mean text?"),
        (ChatRequest, "prompt", "did you mean messages?"),
    ],
)
def test_an_unknown_field_has_a_hint(model: type, field: str, told: str):
    error = complaint(model, BODIES[model] | {field: 1})
    assert str(error) == f"unknown field {error.param!r}; {told}"
