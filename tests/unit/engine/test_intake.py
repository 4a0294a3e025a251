"""What callers in the same process may put into a request."""

import random
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import NewRequest
from foreword.errors import RequestError
from helpers.checked_target import CheckedTarget
from helpers.engines import core_on
from helpers.saboteur import Saboteur


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ({"priority": "high"}, "priority must be a whole number"),
        ({"priority": None}, "priority must be a whole number"),
        ({"deadline_ms": "5"}, "deadline_ms must be a number"),
        ({"deadline_ms": 10**400}, "deadline_ms must be at most"),
        ({"deadline_ms": 0}, "deadline_ms must be positive"),
    ],
)
def test_what_would_break_the_queue_is_refused(setting: dict[str, Any], complaint: str):
    new = NewRequest(**{"request_id": "x", "prompt_token_ids": (1, 2), "params": SamplingParams(), **setting})
    core = core_on(CheckedTarget(Saboteur(random.Random(0), 0.0)))
    with pytest.raises(RequestError, match=complaint) as refusal:
        core.prepare(new)
    assert [refusal.value.param] == list(setting)
