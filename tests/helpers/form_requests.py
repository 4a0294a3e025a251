"""Requests whose answers have prescribed forms, and whether an answer has its own."""

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema_rs

from foreword.acceptance.params import SamplingParams
from foreword.structured.params import StructuredOutputs
from helpers.configurations import Answer, Wanted

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "is_a_member": {"type": "boolean"},
        "hobbies": {"type": "array", "items": {"enum": ["chess", "running", "cooking"]}, "maxItems": 3},
    },
    "required": ["first_name", "age_in_years", "is_a_member"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    PERSON,
    {
        "type": "array",
        "items": {"type": "integer", "minimum": 1, "maximum": 99},
        "minItems": 1,
        "maxItems": 4,
    },
    {"enum": ["red", "green", "blue", 7, None]},
    {
        "type": "object",
        "properties": {
            "question": {"const": "why"},
            "answer": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
        },
        "required": ["question", "answer"],
        "additionalProperties": False,
    },
    {"type": "string", "pattern": "^[a-c]{2,5}$"},
)
LIST = 'root ::= "[" item ("," item)* "]"\nitem ::= [a-c] [0-9]'
FORMS = (
    *(StructuredOutputs(json=schema) for schema in SCHEMAS),
    StructuredOutputs(json=PERSON, whitespace_pattern=r"[ \n]?"),
    StructuredOutputs(regex=r"(yes|no), because [a-z ]{1,20}\."),
    StructuredOutputs(choice=("positive", "negative", "neither of them")),
    StructuredOutputs(grammar=LIST),
)
TOPICS = ("Describe a person.", "Name a colour.", "Count to ten.", "Is it raining?", "Say something nice.")


def draw_form_requests(
    count: int,
    encode: Callable[[str], Sequence[int]],
    max_tokens: int,
    forms: Sequence[StructuredOutputs] = FORMS,
    seed: int = 0,
) -> list[Wanted]:
    """Every form in turn, greedy and sampled."""
    rng = random.Random(seed)
    shapes: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.95},
        {"temperature": 1.0, "frequency_penalty": 0.4},
        {"temperature": 0.9, "logprobs": 2},
    )
    return [
        Wanted(
            f"form-{index}",
            tuple(encode(rng.choice(TOPICS))),
            SamplingParams(
                **shapes[rng.randrange(len(shapes))],
                seed=rng.randrange(1 << 60),
                max_tokens=max_tokens,
                n=rng.choice((1, 1, 2)),
                structured=forms[index % len(forms)],
            ),
        )
        for index in range(count)
    ]


def has_form(text: str, form: StructuredOutputs) -> bool:
    """Whether a whole answer has its form, as others than the parser see it."""
    if form.json is not None:
        return bool(jsonschema_rs.validator_for(json.loads(str(form.json))).is_valid(json.loads(text)))
    if form.choice is not None:
        return text in form.choice
    if form.regex is not None:
        return re.fullmatch(form.regex, text) is not None
    return re.fullmatch(r"\[[a-c][0-9](,[a-c][0-9])*\]", text) is not None


def check_form(answer: Answer, wanted: Wanted) -> None:
    """An answer that ends by itself has its form; any other says that it was cut off."""
    form = wanted.params.structured
    assert form is not None
    if answer.finish_reason == "stop":
        assert has_form(answer.text, form), f"{answer.text!r} does not fit {form}"
    else:
        assert answer.finish_reason == "length", answer
