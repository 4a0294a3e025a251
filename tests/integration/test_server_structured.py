"""Forms, tools and OpenAI's newest route through a real engine with a random model: what it must say, it says."""

import json
import re
from pathlib import Path

import jsonschema_rs
import openai
import pytest

from foreword.server.settings import ServerSettings
from helpers.local_server import LocalServer
from helpers.real_server import real_server, with_context

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "How it is.", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "boolean"}},
                                                   "required": ["a"], "additionalProperties": False}},
    },
]  # fmt: skip
MESSAGES = [{"role": "user", "content": "hello"}]
GRAMMAR = 'root ::= "<" [a-c]+ ">"'


def function(name: str, parameters: object = None) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose context holds what is said about tools."""
    return with_context(tiny_model, tmp_path_factory.mktemp("wide"), 2048)


@pytest.fixture(scope="module")
def server(model: Path):
    with real_server(model, ServerSettings("tiny")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: LocalServer):
    return server.openai()


def fits(text: str) -> bool:
    return bool(jsonschema_rs.validator_for(SCHEMA).is_valid(json.loads(text)))


JSON_FORMS = {
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": SCHEMA, "strict": True},
    },
    "structured_outputs": {"json": SCHEMA},
    "guided_json": SCHEMA,
    "json_schema": SCHEMA,
}
TEXT_FORMS = [
    ({"structured_outputs": {"regex": "[ab]{3}"}}, "[ab]{3}"),
    ({"guided_regex": "[ab]{3}"}, "[ab]{3}"),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ({"guided_choice": ["yes", "no"]}, "yes|no"),
    ({"grammar": GRAMMAR}, "<[a-c]+>"),
    ({"guided_grammar": GRAMMAR}, "<[a-c]+>"),
    ({"response_format": {"type": "json_object"}, "max_tokens": 5}, r"\{.*"),
]


@pytest.mark.parametrize("field", JSON_FORMS)
def test_an_answer_fits_its_schema_streamed_or_not(client, field: str):
    asked = {"model": "tiny", "messages": MESSAGES, "seed": 3, "extra_body": {field: JSON_FORMS[field]}}
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "stop"
    assert fits(whole.message.content)
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(("fields", "pattern"), TEXT_FORMS, ids=lambda value: str(value)[:40])
def test_an_answer_has_its_form_on_both_routes(client, fields, pattern: str):
    asked = {"max_tokens": 60, **fields}
    told = client.completions.create(model="tiny", prompt="x", seed=5, max_tokens=asked.pop("max_tokens"),
                                     extra_body=asked).choices[0]  # fmt: skip
    if told.finish_reason == "stop":
        assert re.fullmatch(pattern, told.text)
    assert re.match(r"[<\{abyn]", told.text)
    with_logprobs = client.chat.completions.create(
        model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=20, max_tokens=3, extra_body=asked
    )
    top = with_logprobs.choices[0].logprobs.content[0].top_logprobs
    assert all(entry.logprob > -9000 for entry in top)
    assert sum(2.72**entry.logprob for entry in top) <= 1.01


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"guided_regex": "a", "grammar": GRAMMAR}, "both set the response format"),
        ({"response_format": {"type": "json_schema"}}, "json_schema must be an object with a schema"),
        ({"response_format": {"type": "xml"}}, "type 'xml' is not supported"),
        ({"guided_json": {"type": "array", "uniqueItems": True}},
         '"uniqueItems", which is not supported'),
        ({"structured_outputs": {"regex": "(a"}}, "unclosed group"),
        ({"structured_outputs": {"json": SCHEMA, "regex": "a"}}, "give one of"),
        ({"guided_regex": "(a{1000}){1000}"}, "regex: "),
        ({"guided_choice": []}, "guided_choice: choice must be"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "exclude each other"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "no tool 'fly'"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "the same name"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "exclude each other"),
        ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
        ({"tools": [function("a b")]}, "must be 1 to 64 letters, digits, underscores and hyphens"),
        ({"tools": [function("f", {"type": "string"})]}, 'must be a JSON schema of type "object"'),
        ({"tools": [function("f", {"properties": {"a": {"not": {}}}})], "tool_choice": "required"},
         'tool f: the schema uses "not", which is not supported'),
        ({"tools": [TOOLS[0], function("g", {"properties": {"a": {"not": {}}}})], "tool_choice": "required"},
         "tool g: the schema uses"),
        ({"guided_choice": ["yes"], "min_tokens": 100, "max_tokens": 120}, "leave no token to generate"),
        ({"guided_regex": "[ab]{9}", "allowed_token_ids": [4]}, "leave no token to generate"),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_in_one_line(client, fields, complaint: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body={"max_tokens": 4} | fields)
    assert complaint in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.param.split(".")[0] in fields


@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_call_is_made_streamed_or_not(client, parallel: bool):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": "required", "seed": 7}
    whole = client.chat.completions.create(**asked, parallel_tool_calls=parallel, max_tokens=400).choices[0]
    calls = whole.message.tool_calls
    assert whole.message.content is None
    if not parallel:
        assert len(calls) == 1
        assert whole.finish_reason == "tool_calls"
    for call in calls[: len(calls) if whole.finish_reason == "tool_calls" else -1]:
        given = json.loads(call.function.arguments)
        assert fits(call.function.arguments) if call.function.name == "weather" else set(given) == {"a"}
    told: dict[int, list[str]] = {}
    ends = []
    for chunk in client.chat.completions.create(
        **asked, parallel_tool_calls=parallel, max_tokens=400, stream=True
    ):
        for part in chunk.choices[0].delta.tool_calls or ():
            if part.id:
                told[part.index] = [part.function.name, ""]
            told[part.index][1] += part.function.arguments or ""
        ends.append(chunk.choices[0].finish_reason)
    assert [tuple(call) for call in told.values()] == [(c.function.name, c.function.arguments) for c in calls]
    assert ends[-1] == whole.finish_reason


def test_a_named_call_is_that_one_and_ends_with_stop(client):
    choice = {"type": "function", "function": {"name": "add"}}
    told = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice=choice, temperature=0, max_tokens=200
    ).choices[0]
    assert [call.function.name for call in told.message.tool_calls] == ["add"]
    assert told.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_that_is_cut_leaves_no_marks_as_text(client, choice):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "tool_choice": choice, "seed": 1}
    cut = client.chat.completions.create(**asked, max_tokens=4).choices[0]
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", None, None)
    chunks = list(client.chat.completions.create(**asked, max_tokens=4, stream=True))
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    stopped = client.chat.completions.create(
        **asked, max_tokens=99, stop=['"name": "A', '"name": "B']
    ).choices[0]
    if stopped.message.tool_calls:  # of the weather, whose arguments begin so
        assert stopped.finish_reason == "stop"


UNTAGGED = 'I add.\n```json\n{"name": "add", "arguments": {"a": true}}\n```'


def test_a_call_without_tags_is_a_call_unless_no_tool_may_be_called(client):
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 400}
    asked |= {"extra_body": {"guided_choice": [UNTAGGED]}}
    whole = client.chat.completions.create(**asked).choices[0]
    assert (whole.message.content, whole.finish_reason) == ("I add.", "tool_calls")
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("add", '{"a": true}')
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "I add.\n"
    (part,) = (part for chunk in chunks for part in chunk.delta.tool_calls or ())
    assert (part.index, part.function.name, part.function.arguments) == (0, "add", '{"a": true}')
    assert chunks[-1].finish_reason == "tool_calls"
    text = client.chat.completions.create(**asked, tool_choice="none").choices[0]
    assert (text.message.content, text.message.tool_calls, text.finish_reason) == (UNTAGGED, None, "stop")


def test_a_response_has_calls_without_tags(client):
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {"model": "tiny", "input": "x", "tools": tools, "extra_body": {"guided_choice": [UNTAGGED]}}
    message, call = client.responses.create(**asked).output
    assert message.content[0].text == "I add."
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": true}')
    events = list(client.responses.create(**asked, stream=True))
    (done,) = (event for event in events if event.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments


def test_a_conversation_with_calls_goes_on(client, server: LocalServer):
    calls = [{"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": true}'}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call-1", "content": "1"},
    ]
    answers = [
        client.chat.completions.create(
            model="tiny", messages=messages, tools=TOOLS, tool_choice=choice, max_tokens=3,
            extra_body={"return_token_ids": True},
        )
        for choice in ("auto", "none")
    ]  # fmt: skip
    tokenizer = server.context.prompts.tokenizer
    with_tools, without = (tokenizer.decode(a.prompt_token_ids) for a in answers)
    assert "Be brief.\n\nYou may call tools." in with_tools
    assert "You may call" not in without
    for shown in (with_tools, without):
        assert '<tool_call>[{"name": "add", "arguments": {"a": true}}]</tool_call>' in shown
        assert "<tool_response>\n1\n</tool_response>" in shown


def test_the_message_of_a_tool_says_which_call_it_answers(client):
    messages = [*MESSAGES, {"role": "tool", "content": "1"}]
    with pytest.raises(openai.BadRequestError, match="tool_call_id is missing"):
        client.chat.completions.create(model="tiny", messages=messages, max_tokens=1)


def test_responses_are_answers_in_another_form(client):
    asked = {"model": "tiny", "input": "hello", "max_output_tokens": 12, "temperature": 0}
    plain = client.responses.create(**asked, instructions="Be brief.")
    assert plain.status == "incomplete"
    assert plain.incomplete_details.reason == "max_output_tokens"
    assert plain.usage.output_tokens == 12
    events = list(client.responses.create(**asked, instructions="Be brief.", stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == plain.output_text == events[-1].response.output_text


def test_responses_have_forms_and_tools(client):
    form = {"format": {"type": "json_schema", "name": "p", "schema": SCHEMA}}
    told = client.responses.create(model="tiny", input=[{"role": "user", "content": "hello"}], text=form)
    assert told.status == "completed"
    assert fits(told.output_text)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    asked = {
        "model": "tiny",
        "input": "x",
        "tools": tools,
        "tool_choice": {"type": "function", "name": "add"},
    }
    told = client.responses.create(**asked, temperature=0)
    (call,) = told.output
    assert (call.type, call.name) == ("function_call", "add")
    assert told.tool_choice.to_dict() == asked["tool_choice"]
    events = list(client.responses.create(**asked, temperature=0, stream=True))
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [event.arguments for event in done] == [call.arguments]
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
    ]
    assert client.responses.create(model="tiny", input=items, max_output_tokens=2).output


@pytest.mark.parametrize(
    ("fields", "complaint", "param"),
    [
        ({"tools": [{"type": "function", "name": "a b"}]}, "name: must be 1 to 64 letters", "tools"),
        ({"input": [{"role": "x", "content": "a"}]}, "role: must be 'system'", "input"),
        ({"text": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, '"not"', "text"),
    ],
)
def test_a_response_that_cannot_be_had_is_refused_in_one_line(client, fields, complaint: str, param: str):
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "tiny", "input": "x"} | fields)
    assert complaint in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.param == param


@pytest.mark.parametrize(
    "field",
    [{"previous_response_id": "resp-1"}, {"background": True}, {"include": ["message.output_text.logprobs"]}],
)
def test_what_a_response_would_have_to_keep_is_refused(client, field):
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.responses.create(model="tiny", input="x", **field)


def test_what_changes_no_response_is_ignored(client):
    ignored = {"store": True, "reasoning": {"effort": "low"}, "truncation": "auto", "service_tier": "flex"}
    answer = client.responses.create(model="tiny", input="x", max_output_tokens=1, **ignored)
    assert not answer.store


def test_the_prompt_is_echoed_with_what_is_known_of_it(client):
    asked = {"model": "tiny", "prompt": "the sky", "temperature": 0, "logprobs": 1}
    plain = client.completions.create(**asked, max_tokens=3).choices[0]
    echoed = client.completions.create(**asked, max_tokens=3, echo=True).choices[0]
    assert echoed.text == "the sky" + plain.text
    assert echoed.logprobs.token_logprobs[0] is None
    assert echoed.logprobs.tokens[-3:] == plain.logprobs.tokens
    assert echoed.logprobs.text_offset[-3] == len("the sky")
    alone = client.completions.create(**asked, max_tokens=0, echo=True)
    assert alone.choices[0].text == "the sky"
    assert alone.usage.completion_tokens == 0
    assert alone.choices[0].logprobs.tokens == echoed.logprobs.tokens[:-3]
    streamed = list(client.completions.create(**asked, max_tokens=3, echo=True, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == echoed.text
    twice = list(client.completions.create(**asked, max_tokens=3, echo=True, stream=True, n=2, seed=1))
    for choice in (0, 1):
        told = [
            c.choices[0].logprobs for c in twice if c.choices[0].index == choice and c.choices[0].logprobs
        ]
        for field in ("tokens", "token_logprobs", "text_offset"):
            listed = [entry for part in told for entry in getattr(part, field)]
            assert listed[:-3] == getattr(echoed.logprobs, field)[:-3]
    with pytest.raises(openai.BadRequestError, match="only with echo"):
        client.completions.create(**asked, max_tokens=0)


def test_token_ids_come_with_the_text(client, server: LocalServer):
    extra = {"return_token_ids": True}
    ids = server.context.prompts.tokenizer.encode("the sky")
    choice = client.completions.create(
        model="tiny", prompt="the sky", max_tokens=3, extra_body=extra
    ).choices[0]
    assert choice.prompt_token_ids == ids
    assert len(choice.token_ids) == 3
    chat = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "temperature": 0, "extra_body": extra}
    whole = client.chat.completions.create(**chat)
    chunks = list(client.chat.completions.create(**chat, stream=True))
    assert chunks[0].prompt_token_ids == whole.prompt_token_ids
    told = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or ()]
    assert told == whole.choices[0].token_ids


def test_the_final_message_is_continued(client, server: LocalServer):
    messages = [*MESSAGES, {"role": "assistant", "content": "Once <|im_end|> upon "}]
    extra = {"continue_final_message": True, "return_token_ids": True, "chat_template_kwargs": {"x": "y"}}
    told = client.chat.completions.create(model="tiny", messages=messages, max_tokens=1, extra_body=extra)
    tokenizer = server.context.prompts.tokenizer
    assert tokenizer.decode(told.prompt_token_ids).endswith("Once <|im_end|> upon ")
    assert tokenizer.control_tokens["<|im_end|>"] not in told.prompt_token_ids[-8:]
