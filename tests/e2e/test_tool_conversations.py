"""The official clients of three APIs hold one conversation with tools with Qwen2.5-Coder 1.5B, and get one text."""

import json
from collections.abc import Callable

import pytest

from foreword.models.sources.builtin import list_models
from helpers.serve_process import ServeProcess, serve

MODEL = "qwen2.5-coder-1.5b"
# The order of keys is that of Ollama's client, which writes schemas anew: the model reads them.
CITY = {"type": "string", "description": "Name of the city, such as Bergen"}
PARAMETERS = {"type": "object", "required": ["city"], "properties": {"city": CITY}}
WHAT = "Return the current weather in a city."
SYSTEM = "You are a helpful assistant. When you have the result of a tool, answer in one short sentence."
QUESTION = "What is the weather in Oslo now?"
RESULT = "light rain, 7 °C"
MOST = 48

Told = tuple[str, list[tuple[str, dict]], str]
"""The text beside the call, the calls, and the final text."""


@pytest.fixture(scope="module")
def server():
    # Imported late: it takes seconds, and most runs leave this test out.
    for client in ("anthropic", "ollama"):
        pytest.importorskip(client, reason=f"the client {client} is not installed: pip install '.[dev]'")
    present = {model.name: model.present for model in list_models()}
    if not present.get(MODEL):
        pytest.skip(f"{MODEL} is not in the cache: foreword pull {MODEL}")
    with serve(
        MODEL, "--max-model-len", "2048", "--speculation", "ngram", factory=None, fresh=True
    ) as running:
        yield running


def by_openai(server: ServeProcess, speculation: bool = True) -> Told:
    import openai

    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=900)
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    function = {"name": "get_weather", "description": WHAT, "parameters": PARAMETERS}
    texts, calls = [], []
    for _ in range(2):
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, tools=[{"type": "function", "function": function}], max_tokens=MOST,
            temperature=0, seed=1, stream=True, extra_body={"speculation": speculation},
        )  # fmt: skip
        text, parts = "", []
        for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                for call in choice.delta.tool_calls or []:
                    if call.id:
                        parts.append({"id": call.id, "type": "function",
                                      "function": {"name": call.function.name, "arguments": ""}})  # fmt: skip
                    parts[-1]["function"]["arguments"] += call.function.arguments or ""
        texts.append(text.strip())
        if parts:
            messages.append({"role": "assistant", "content": text, "tool_calls": parts})
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": RESULT} for one in parts]
            calls += [(one["function"]["name"], json.loads(one["function"]["arguments"])) for one in parts]
    return texts[0], calls, texts[1]


def by_anthropic(server: ServeProcess) -> Told:
    import anthropic

    client = anthropic.Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=900)
    messages: list = [{"role": "user", "content": QUESTION}]
    tool = {"name": "get_weather", "description": WHAT, "input_schema": PARAMETERS}
    texts, calls = [], []
    for _ in range(2):
        with client.messages.stream(
            model=MODEL, system=SYSTEM, messages=messages, tools=[tool], max_tokens=MOST,
            extra_body={"seed": 1, "temperature": 0},
        ) as stream:  # fmt: skip
            said = stream.get_final_message()
        texts.append("".join(block.text for block in said.content if block.type == "text").strip())
        used = [block for block in said.content if block.type == "tool_use"]
        if used:
            assert said.stop_reason == "tool_use"
            results = [{"type": "tool_result", "tool_use_id": one.id, "content": RESULT} for one in used]
            messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": results}]
            calls += [(one.name, one.input) for one in used]
    return texts[0], calls, texts[1]


def by_ollama(server: ServeProcess) -> Told:
    import ollama

    client = ollama.Client(host=server.url, timeout=900)
    messages: list = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTION}]
    function = {"name": "get_weather", "description": WHAT, "parameters": PARAMETERS}
    texts, calls = [], []
    for _ in range(2):
        text, used = "", []
        for part in client.chat(
            MODEL, messages, tools=[{"type": "function", "function": function}], stream=True,
            options={"temperature": 0, "seed": 1, "num_predict": MOST},
        ):  # fmt: skip
            text += part.message.content or ""
            used += part.message.tool_calls or []
        texts.append(text.strip())
        if used:
            messages.append({"role": "assistant", "content": text, "tool_calls": used})
            messages += [{"role": "tool", "tool_name": one.function.name, "content": RESULT} for one in used]
            calls += [(one.function.name, dict(one.function.arguments)) for one in used]
    return texts[0], calls, texts[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_client_holds_the_same_conversation_with_a_tool(server: ServeProcess):
    first = by_openai(server)
    _, calls, answer = first
    assert calls == [("get_weather", {"city": "Oslo"})]
    assert "7" in answer
    others: list[Callable[[], Told]] = [
        lambda: by_anthropic(server),
        lambda: by_ollama(server),
        lambda: by_openai(server, speculation=False),
    ]
    for other in others:
        assert other() == first
