"""A server whose laws are known: a Markov chain of words behind OpenAI's completions, in this process."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import httpx2
import numpy as np

END = 0
VOCAB = 61
SHOWN = 20


# Each token is a space and three letters, so that a text is read as it was written.
TEXTS = ["<end>", *(f" {'bdfgkl'[token // 12]}{'bdfgklmnprst'[token % 12]}a" for token in range(1, VOCAB))]
WORDS = {text[1:]: token for token, text in enumerate(TEXTS) if token != END}


@dataclass(frozen=True)
class Place:
    """What comes after two tokens."""

    logprobs: np.ndarray
    steps: np.ndarray  # the law, summed up
    top: dict[str, float]  # the likeliest, first first


def read(prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, list):
        return prompt
    return [WORDS.get(part, 1 + crc32(part.encode()) % (VOCAB - 1)) for part in prompt.split(" ") if part]


class KnownLaws:
    """Draws each token from softmax(logits of the two tokens before it); everything else as OpenAI has it.

    `repeat_penalty` is the default of the field of that name, as in llama.cpp; log probabilities are those before it.
    """

    def __init__(self, seed: int = 0, sharpness: float = 0.4, repeat_penalty: float = 1.0) -> None:
        self._repeat_penalty = repeat_penalty
        rng = np.random.default_rng(seed)
        self._rows = rng.normal(0.0, sharpness, (VOCAB, VOCAB))
        self._columns = rng.normal(0.0, sharpness, (VOCAB, VOCAB))
        self._rows[:, END] -= 1.0
        self._fresh = np.random.default_rng(seed + 1)
        self._places: dict[tuple[int, int], Place] = {}

    def place(self, tokens: list[int]) -> Place:
        pair = (tokens[-2] if len(tokens) > 1 else END), tokens[-1]
        if pair not in self._places:
            logits = self._rows[pair[1]] + self._columns[pair[0]]
            logprobs = logits - np.log(np.exp(logits).sum())
            top = {TEXTS[t]: float(logprobs[t]) for t in np.argsort(-logprobs)[:SHOWN]}
            self._places[pair] = Place(logprobs, np.cumsum(np.exp(logprobs)), top)
        return self._places[pair]

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        await asyncio.sleep(0)  # requests that were sent together overlap
        if request.url.path.endswith("/models"):
            return httpx2.Response(200, json={"data": [{"id": "known", "owned_by": "foreword"}]})
        body = {"repeat_penalty": self._repeat_penalty, **json.loads(request.content)}
        prompt = read(body["prompt"])
        choices = [self._choice(body, prompt, index) for index in range(body.get("n", 1))]
        written = sum(len(choice["token_ids"]) for choice in choices)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": written}
        usage["total_tokens"] = sum(usage.values())
        if not body.get("return_token_ids"):
            for choice in choices:
                del choice["token_ids"], choice["prompt_token_ids"]
        if not body.get("stream"):
            return httpx2.Response(200, json={"choices": choices, "usage": usage})
        events = [event for choice in choices for event in _chunks(choice)]
        return stream_response([*events, {"choices": [], "usage": usage}])

    def token(self, place: Place, body: dict[str, Any], written: list[int], rng: np.random.Generator) -> int:
        """Return the next token of an answer."""
        return _draw(place, body, written, rng)

    def _choice(self, body: dict[str, Any], prompt: list[int], index: int) -> dict[str, Any]:
        seed = body.get("seed")
        rng = self._fresh if seed is None else np.random.default_rng((seed, index))
        written: list[int] = []
        told: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        text, reason = "", "length"
        while len(written) < body["max_tokens"]:
            place = self.place([*prompt[-2:], *written[-2:]])
            token = self.token(place, body, written, rng)
            if body.get("logprobs"):
                told["tokens"].append(TEXTS[token])
                told["token_logprobs"].append(float(place.logprobs[token]))
                told["top_logprobs"].append(place.top)
                told["text_offset"].append(len(text))
            written.append(token)
            if token == END:
                reason = "stop"
                break
            text += TEXTS[token]
            stops = [text.index(stop) for stop in body.get("stop") or () if stop in text]
            if stops:
                text, reason = text[: min(stops)], "stop"
                break
        return {
            "index": index,
            "text": text,
            "finish_reason": reason,
            "logprobs": told if body.get("logprobs") else None,
            "token_ids": written,
            "prompt_token_ids": prompt,
        }


class ChangesTexts(KnownLaws):
    """Greedy texts are other ones from this token on where speculation is not switched off."""

    first_changed = 45

    def token(self, place: Place, body: dict[str, Any], written: list[int], rng: np.random.Generator) -> int:
        is_speculating = body["temperature"] == 0 and body.get("speculation") is not False
        if is_speculating and len(written) == self.first_changed:
            return int(np.argsort(-place.logprobs)[1])
        return super().token(place, body, written, rng)


class CutsStreams(KnownLaws):
    """Ends a stream with [DONE] and without a finish_reason when another request arrives, as llama-cpp-python does."""

    arrived = 0

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.arrived += 1
        number = self.arrived
        response = await super().__call__(request)
        if number == self.arrived or b'"stream":true' not in request.content:
            return response
        begin = json.loads(response.content.split(b"\n", 1)[0].removeprefix(b"data: "))
        return stream_response([begin])


def _draw(place: Place, body: dict[str, Any], written: list[int], rng: np.random.Generator) -> int:
    is_plain = body["repeat_penalty"] == 1 and not (body.get("presence_penalty") or body.get("logit_bias"))
    if body["temperature"] == 1 and is_plain:
        return int(np.searchsorted(place.steps, rng.random() * place.steps[-1]))
    scores = place.logprobs.copy()
    repeated = list(set(written))
    scores[repeated] = scores[repeated] * body["repeat_penalty"] - body.get("presence_penalty", 0.0)
    for token, bias in (body.get("logit_bias") or {}).items():
        if int(token) < VOCAB:
            scores[int(token)] += bias
    if body["temperature"] == 0:
        return int(scores.argmax())
    law = np.exp(scores / body["temperature"])
    return int(np.searchsorted(np.cumsum(law), rng.random() * law.sum()))


def _chunks(choice: dict[str, Any]) -> list[dict[str, Any]]:
    """The text in pieces of five characters, then the end with all that is told of the tokens."""
    text, index = choice["text"], choice["index"]
    pieces = [text[k : k + 5] for k in range(0, len(text), 5)]
    chunks: list[dict[str, Any]] = [{"index": index, "text": p, "finish_reason": None} for p in pieces]
    return [{"choices": [chunk]} for chunk in [*chunks, {**choice, "text": ""}]]


def stream_response(events: list[dict[str, Any]], *, done: bool = True) -> httpx2.Response:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events] + ["data: [DONE]\n\n"] * done
    return httpx2.Response(
        200, headers={"content-type": "text/event-stream"}, content="".join(lines).encode()
    )
