import re

import pytest

from foreword.server.api.message_types import Message
from foreword.server.api.response_items import flat_choice, flat_tools, item_messages

REASONING = {"type": "reasoning", "id": "rs-1", "summary": [], "encrypted_content": None, "status": "completed",
             "content": [{"type": "reasoning_text", "text": "Let me look."}]}  # fmt: skip
SAID = {"type": "message", "role": "assistant", "id": "msg-1", "status": "completed",
        "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]}  # fmt: skip


def call(number: int) -> dict:
    return {"type": "function_call", "id": "fc", "call_id": f"c{number}", "name": "look", "arguments": "{}",
            "status": "completed"}  # fmt: skip


def result(number: int) -> dict:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": "7"}


def test_the_items_of_an_answer_are_one_message_as_on_the_chat_route():
    """The items are those that the client sends back: what the template sees must not depend on the route."""
    items = [{"role": "user", "content": "x"}, REASONING, SAID, call(1), call(2), result(1), result(2)]
    calls = [{"id": f"c{n}", "function": {"name": "look", "arguments": "{}"}} for n in (1, 2)]
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Let me look."}
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "7"} for n in (1, 2)]
    expected = [{"role": "user", "content": "x"}, answer | {"tool_calls": calls}, *results]
    assert item_messages(items) == [Message.model_validate(one) for one in expected]


@pytest.mark.parametrize(
    ("items", "count"),
    [
        ([SAID, SAID], 2),
        ([call(1), result(1), call(2)], 3),
        ([call(1), SAID], 2),
        ([SAID, REASONING, SAID], 2),
        ([REASONING, call(1)], 1),
        ([REASONING], 1),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "y"}], 2),
    ],
)
def test_other_items_stay_apart(items: list[dict], count: int):
    assert len(item_messages(items)) == count


def test_a_refusal_is_text_and_reasoning_may_be_kept_back():
    refused = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    (message,) = item_messages([{"type": "reasoning", "summary": [], "content": None}, refused])
    assert (message.text, message.reasoning_content) == ("No.", "")


def test_a_part_that_is_not_text_is_refused():
    image = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}
    with pytest.raises(ValueError, match=r"item 1 has a part of type 'input_image'.*vision model"):
        item_messages([{"role": "user", "content": "x"}, image])


@pytest.mark.parametrize("kind", [["x"], {}, 7, None])
def test_a_part_of_no_known_type_is_refused(kind: object):
    with pytest.raises(ValueError, match="item 0 has a part"):
        item_messages([{"role": "user", "content": [{"type": kind}]}])


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("item", "complaint"),
    [
        (5, "item 1 is not an object; use message, function_call or function_call_output"),
        ({"type": "image"}, "item 1 is of type 'image'; use message, function_call or function_call_output"),
        *(
            (
                {"type": kind},
                "item 1 has a type that is not a text; use message, function_call or function_call_output",
            )
            for kind in (None, 5, {}, ["message"])
        ),
        ({}, "item 1 has no role"),
        (
            USER | {"role": 5},
            "item 1: role: must be 'system', 'developer', 'user', 'assistant' or 'tool'",
        ),
        (
            USER | {"content": 5},
            "item 1 has a part that is no object with a type; this server takes parts of type text",
        ),
        *(
            (
                USER | {"content": [{"type": "input_text", "text": text}]},
                "item 1 has a part whose text is not a text",
            )
            for text in (None, 5, ["x"])
        ),
        (
            REASONING | {"content": [{"type": "reasoning_text", "text": None}]},
            "item 1 has a part whose text is not a text",
        ),
        (call(1) | {"call_id": 5}, "item 1: call_id: must be a text"),
        (call(1) | {"name": None}, "item 1: name: must be a text"),
        (call(1) | {"arguments": "x"}, "item 1: arguments: must be JSON"),
        (result(1) | {"call_id": 5}, "item 1: call_id: must be a text"),
        (result(1) | {"call_id": None}, "item 1 has no call_id"),
        (
            USER | {"role": "tool"},
            "item 1: tool_call_id is missing: a tool's message says which call it answers",
        ),
    ],
)
def test_an_error_names_the_item_and_its_field(item: object, complaint: str):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        item_messages([USER, item])


@pytest.mark.parametrize(
    ("tool", "complaint"),
    [
        (5, "tool 0 is of another type; only tools of type function are supported"),
        ({"type": "web_search"}, "tool 0 is of another type; only tools of type function are supported"),
        ({"type": "function"}, "tool 0: name: is missing"),
        ({"type": "function", "name": "f", "parameters": 5}, "tool 0: parameters: must be an object"),
    ],
)
def test_an_error_names_the_tool(tool: object, complaint: str):
    with pytest.raises(ValueError, match=re.escape(complaint)):
        flat_tools([tool])


@pytest.mark.parametrize("choice", [5, "f", {}, {"type": "function"}, {"type": "function", "name": 5}])
def test_a_wrong_tool_choice_is_answered_with_this_routes_format(choice: object):
    with pytest.raises(ValueError, match=r'\{"type": "function", "name": ...\}'):
        flat_choice(choice)
