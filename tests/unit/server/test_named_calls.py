"""Calls whose header names the tool are read wherever the answer is cut, also without the names of control tokens."""

import json
import random
import re

import pytest

from foreword.errors import RequestError
from foreword.server.api.call_format import ArgumentsDelta, CallStart, TextDelta
from foreword.server.api.conversation import AnswerPart, AnswerReader, Conversation, ToolUse
from foreword.server.api.message_types import ToolFunction
from foreword.server.api.named_calls import NAMED_FORMATS
from foreword.server.api.reasoning import FORMATS as REASONING
from foreword.server.api.reasoning import Reasoning
from foreword.server.api.tool_blocks import format_of
from foreword.structured.compiled import GrammarTokens
from foreword.structured.compiler import Grammars
from foreword.structured.state import GrammarError, GrammarState
from foreword.structured.thinking import ThinkingState, ThinkingTags
from helpers.tiny_grammars import grammars

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
FUNCTIONS = [
    ToolFunction(name="get", parameters=SCHEMA),
    ToolFunction(name="get_time"),
    ToolFunction(name="add-2", parameters={"type": "object", "properties": {"a": {"type": "array"}}}),
]
TOOLS = {one.name: one.argument_schema for one in FUNCTIONS}
GET = ("get", {"city": 'San "José" {7\\', "days": 3})
TIME = ("get_time", {})
ADD = ("add-2", {"a": ["}", {"b": "\\"}]})
CONTROL = ("channel", "message", "start", "end", "constrain", "call", "return")
ARGUMENTS = '{"city": "Oslo"}'


def pieces_of(text: str) -> list[list[str]]:
    """As a whole, by characters, and at random."""
    rng = random.Random(text)
    ways = [[text], list(text)]
    for _ in range(8):
        cuts = sorted(rng.randrange(len(text) + 1) for _ in range(4))
        ways.append([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])
    return ways


def read(name: str, pieces: list[str], most: int | None = None) -> tuple[str, list[tuple[str, object]]]:
    reader = NAMED_FORMATS[name].reader(TOOLS, max_calls=most)
    events = [event for piece in pieces for event in reader.feed(piece)] + reader.finish()
    said = "".join(event.text for event in events if isinstance(event, TextDelta))
    names = [event.name for event in events if isinstance(event, CallStart)]
    given = {event.index: event.text for event in events if isinstance(event, ArgumentsDelta)}
    assert reader.count == len(names)
    return said, [(name, json.loads(given[number])) for number, name in enumerate(names)]


def shown(text: str) -> str:
    """The text of an answer, which has no control tokens."""
    return re.sub(r"<\|\w+\|>|\[[A-Z_]+\]", "", text)


OSLO = [("get", {"city": "Oslo"})]
CASES = [
    ("openai", f"<|channel|>commentary to=functions.get <|constrain|>json<|message|>{ARGUMENTS}", "", OSLO),
    ("openai", f"<|channel|>commentary to=functions.get<|message|>{ARGUMENTS}<|call|>", "", OSLO),
    ("openai", f" to=functions.get<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>", "", OSLO),
    ("openai", f"<|channel|>analysis to=functions.get code<|message|>{ARGUMENTS}<|call|>", "", OSLO),
    ("openai", "<|channel|>commentary to=functions.get_time json<|message|>{}<|call|>", "", [TIME]),
    (
        "openai",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.get "
        f"<|constrain|>json<|message|>{ARGUMENTS}<|call|>",
        "I look.",
        OSLO,
    ),
    (
        "openai",
        f"<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get<|channel|>commentary "
        f"json<|message|>{ARGUMENTS}<|call|>",
        "I look.",
        OSLO,
    ),
    (
        "openai",
        "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>commentary<|message|>Two."
        "<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
        "One.\nTwo.\n42",
        [],
    ),
    ("openai", "commentary on the game, assistant to=me", "commentary on the game, assistant to=me", []),
    ("openai", "comm", "comm", []),
    ("openai", "to=functions.get is how", "to=functions.get is how", []),
    ("mistral_args", f"[TOOL_CALLS]get[ARGS]{ARGUMENTS}", "", OSLO),
    ("mistral_args", f"[TOOL_CALLS]get[CALL_ID]a1B2c3D4e[ARGS]{ARGUMENTS}", "", OSLO),
    ("mistral_args", f"I look.[TOOL_CALLS]get[ARGS]{ARGUMENTS}", "I look.", OSLO),
    (
        "mistral_args",
        f"[TOOL_CALLS]get[ARGS]{ARGUMENTS}[TOOL_CALLS]get_time[ARGS]{{}} So.",
        "So.",
        [*OSLO, TIME],
    ),
    ("mistral_args", "The class get_time{} is empty", "The class get_time{} is empty", []),
    ("mistral_args", "get the time of get", "get the time of get", []),
    ("mistral_args", "A forget{}", "A forget{}", []),
]


@pytest.mark.parametrize(("name", "written", "said", "calls"), CASES)
def test_calls_and_text(name: str, written: str, said: str, calls: list):
    for pieces in pieces_of(shown(written)):
        assert read(name, pieces) == (said, calls)


def test_marks_that_are_text_are_read_too():
    for written, said in ((f"a[TOOL_CALLS]get[ARGS]{ARGUMENTS}", "a"), (f"[TOOL_CALLS]get{ARGUMENTS}", "")):
        for pieces in pieces_of(written):
            assert read("mistral_args", pieces) == (said, OSLO)


@pytest.mark.parametrize("name", NAMED_FORMATS)
def test_calls_that_were_written_are_read_again(name: str):
    calls = [GET, TIME, ADD]
    for pieces in pieces_of(shown(f"I look.\n{NAMED_FORMATS[name].format_calls(calls)}\nDone")):
        assert read(name, pieces) == ("I look.\nDone", calls)
        assert read(name, pieces, most=1)[1] == calls[:1]


@pytest.mark.parametrize("name", NAMED_FORMATS)
def test_what_is_no_call_of_these_tools_is_text(name: str):
    written = shown(NAMED_FORMATS[name].format_calls([("other", {"a": 1})]))
    cut = shown(NAMED_FORMATS[name].format_calls([GET]))
    texts = (
        written,
        cut[:-1],
        cut.replace(": 3", ": x"),
        cut.replace('"days"', '"da\nys"'),
        "[1] is",
        " ",
        "",
    )
    for text in texts:
        for pieces in pieces_of(text):
            said, calls = read(name, pieces)
            assert calls == []
            assert said == text


def test_text_is_given_as_soon_as_it_cannot_be_a_header():
    reader = NAMED_FORMATS["mistral_args"].reader(TOOLS)
    assert reader.feed("get") == []
    assert reader.feed(" it") == [TextDelta("get it")]
    reader = NAMED_FORMATS["openai"].reader(TOOLS)
    assert reader.feed("Hello to") == [TextDelta("Hello")]
    assert reader.feed(" you") == [TextDelta(" to you")]


@pytest.mark.parametrize("name", NAMED_FORMATS)
def test_what_is_cut_of_a_forced_call_is_no_text(name: str):
    written = shown(NAMED_FORMATS[name].format_calls([GET]))
    for length in range(1, len(written)):
        use = ToolUse(NAMED_FORMATS[name], FUNCTIONS, "required")
        writer = Conversation([], use).reader()
        assert writer.feed(written[:length], is_end=True) == AnswerPart("", [])
        assert writer.finish_reason("stop") == "stop"
    whole = Conversation([], use).reader()
    assert whole.whole(written).text is None
    assert whole.finish_reason("stop") == "tool_calls"


@pytest.mark.parametrize(
    ("written", "thought", "said", "calls"),
    [
        (
            "<|channel|>analysis<|message|>Weather? <|end|><|start|>assistant<|channel|>commentary "
            f"to=functions.get <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
            "Weather?",
            None,
            ["get"],
        ),
        (
            "<|channel|>analysis<|message|>Weather?<|end|><|start|>assistant to=functions.get<|channel|>"
            f"commentary json<|message|>{ARGUMENTS}<|call|>",
            "Weather?",
            None,
            ["get"],
        ),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look."
            "<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>",
            "Hm.",
            "I look.\n42",
            [],
        ),
        (
            "<|channel|>analysis<|message|>An assistant to all<|end|><|start|>assistant<|channel|>final<|message|>42",
            "An assistant to all",
            "42",
            [],
        ),
        (f"<|channel|>commentary to=functions.get json<|message|>{ARGUMENTS}<|call|>", "", None, ["get"]),
    ],
)
def test_calls_after_reasoning_in_channels(written: str, thought: str, said: str | None, calls: list[str]):
    conversation = Conversation(
        [], ToolUse(NAMED_FORMATS["openai"], FUNCTIONS), Reasoning(REASONING["openai_gptoss"], is_open=False)
    )
    whole = AnswerReader(conversation).whole(shown(written))
    assert (whole.reasoning, whole.text, [call.function.name for call in whole.calls]) == (
        thought,
        said,
        calls,
    )
    for pieces in pieces_of(shown(written)):
        reader = AnswerReader(conversation)
        parts = [reader.feed(piece, number == len(pieces) - 1) for number, piece in enumerate(pieces)]
        assert "".join(part.reasoning for part in parts) == thought
        assert "".join(part.text or "" for part in parts) == (said or "")
        assert [call.function.name for part in parts for call in part.calls] == calls


def harmony_tokens() -> GrammarTokens:
    """Bytes, and gpt-oss's control tokens."""
    names = [f"<|{name}|>" for name in CONTROL]
    pieces = [*(bytes([byte]) for byte in range(256)), *(name.encode() for name in names)]
    ends = 256 + CONTROL.index("call"), 256 + CONTROL.index("return")
    return GrammarTokens(pieces, ends, lambda text: list(text.encode()), range(256, 263), frozenset(names))


def harmony_ids(text: str) -> list[int]:
    ids: list[int] = []
    for part in re.split(r"(<\|\w+\|>)", text):
        is_control = part.startswith("<|")
        ids += [256 + CONTROL.index(part[2:-2])] if is_control else list(part.encode())
    return ids


def is_allowed(state: GrammarState | ThinkingState, written: str) -> bool:
    try:
        for token in harmony_ids(written):
            state.commit([token])
    except GrammarError:
        return False
    return True


HEADER = "<|channel|>commentary to=functions.get <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("name", "written", "fits"),
    [
        ("openai", f"{HEADER}{ARGUMENTS}<|call|>", True),
        ("openai", f"{HEADER}{{}}", False),
        ("openai", f"{HEADER}{ARGUMENTS}{HEADER}", False),
        (
            "openai",
            f"<|channel|>commentary to=functions.other <|constrain|>json<|message|>{ARGUMENTS}",
            False,
        ),
        ("openai", f"commentary to=functions.get json{ARGUMENTS}", False),
        ("mistral_args", f"get{ARGUMENTS}get_time{{}}<|call|>", True),
        ("mistral_args", f"I look.get{ARGUMENTS}", False),
    ],
)
def test_required_calls_have_a_grammar(name: str, written: str, fits: bool):
    use = ToolUse(NAMED_FORMATS[name], FUNCTIONS, "required")
    wanted = use.structured(None)
    assert wanted is not None
    assert is_allowed(Grammars(harmony_tokens).begin(wanted), written) == fits
    assert use.structured(None) == wanted
    assert ToolUse(NAMED_FORMATS[name], FUNCTIONS).structured(None) is None


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


@pytest.mark.parametrize(
    ("written", "fits"),
    [
        (f"{ANALYSIS}{HEADER}{ARGUMENTS}<|call|>", True),
        (f"{HEADER}{ARGUMENTS}<|call|>", True),
        (f"{ANALYSIS}<|channel|>final<|message|>No.", False),
        ("<|channel|>analysis<|message|>Hm.<|return|>", False),
    ],
)
def test_a_required_call_follows_the_reasoning(written: str, fits: bool):
    use = ToolUse(NAMED_FORMATS["openai"], FUNCTIONS, "required")
    wanted, tokens = use.structured(None), harmony_tokens()
    limit = Reasoning(REASONING["openai_gptoss"], is_open=False).limit(
        None, wanted, use.call_format.reasoning_end
    )
    assert wanted is not None
    assert limit is not None
    begin, end = (tuple(harmony_ids(tag)) for tag in (limit.begin, limit.end))
    tags = ThinkingTags(
        limit.begin.encode(), limit.end.encode(), begin, end, tokens.pieces.__getitem__, 263, tokens.end_ids
    )
    state = ThinkingState(tags, None, is_open=False, grammar=Grammars(harmony_tokens).begin(wanted))
    assert is_allowed(state, written) == fits


def test_one_call_at_most():
    wanted = ToolUse(NAMED_FORMATS["mistral_args"], FUNCTIONS, "required", max_calls=1).structured(None)
    assert wanted is not None
    state = Grammars(harmony_tokens).begin(wanted)
    state.commit(harmony_ids(f"get{ARGUMENTS}"))
    with pytest.raises(GrammarError):
        state.commit(harmony_ids("get"))


def test_a_model_without_the_control_tokens_is_refused():
    wanted = ToolUse(NAMED_FORMATS["openai"], FUNCTIONS, "required").structured(None)
    assert wanted is not None
    with pytest.raises(RequestError, match="channel"):
        grammars().begin(wanted)


def test_templates_teach_their_formats():
    assert format_of("{{ '<|channel|>commentary' }}").name == "openai"
    assert format_of("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}").name == "mistral_args"
    assert format_of("[TOOL_CALLS][{{ call }}]").name == "mistral"
