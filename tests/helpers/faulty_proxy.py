"""A proxy that breaks a correct server in known ways."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx2

from helpers.known_law_server import stream_response

Json = dict[str, Any]


@dataclass
class Fault:
    """What is done to requests, to choices and to streams, and the claims that it refutes."""

    refutes: str
    before: Callable[["FaultyProxy", Json], None] = lambda proxy, body: None
    choice: Callable[["FaultyProxy", Json, Json], None] = lambda proxy, body, choice: None
    answer: Callable[["FaultyProxy", Json, Json], None] = lambda proxy, body, answer: None
    events: Callable[["FaultyProxy", list[Json]], None] = lambda proxy, events: None
    also: tuple[str, ...] = ()  # claims that it may refute too
    done: bool = True  # streams end with [DONE]


class FaultyProxy(httpx2.AsyncBaseTransport):
    """Passes requests on to another transport and answers back, with one fault."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, fault: Fault) -> None:
        self._inner = inner
        self._fault = fault
        self.rng = random.Random(5)
        self.under_way = 0
        self.last_prompt = ""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return await self._inner.handle_async_request(request)
        body = json.loads(request.content)
        self.under_way += 1
        try:
            self._fault.before(self, body)
            self.last_prompt = body["prompt"]
            passed = httpx2.Request("POST", request.url, json=body)
            response = await self._inner.handle_async_request(passed)
            content = await response.aread()
        finally:
            self.under_way -= 1
        if response.status_code != 200:
            return httpx2.Response(response.status_code, content=content)
        if not body.get("stream"):
            return httpx2.Response(200, json=self._broken(body, json.loads(content)))
        found = [line[6:] for line in content.decode().split("\n") if line.startswith("data: {")]
        events = [self._broken(body, json.loads(data)) for data in found]
        self._fault.events(self, events)
        return stream_response(events, done=self._fault.done)

    def _broken(self, body: Json, answer: Json) -> Json:
        for choice in answer["choices"]:
            self._fault.choice(self, body, choice)
        self._fault.answer(self, body, answer)
        return answer


def _bias(proxy: FaultyProxy, body: Json, choice: Json) -> None:
    """One token in a hundred is the likeliest instead of what was drawn."""
    told = choice.get("logprobs")
    if body["temperature"] != 1 or not told or body.get("n", 1) < 5:
        return
    for place, top in enumerate(told["top_logprobs"]):
        if proxy.rng.random() < 0.01:
            told["tokens"][place], told["token_logprobs"][place] = max(top.items(), key=lambda pair: pair[1])
    choice["text"] = "".join(told["tokens"]).removesuffix("<end>")


def _drop_before_stop(proxy: FaultyProxy, body: Json, choice: Json) -> None:
    if body.get("stop") and choice["finish_reason"] == "stop" and not body.get("stream"):
        choice["text"] = choice["text"][:-1]


def _lower_logprobs(proxy: FaultyProxy, body: Json, choice: Json) -> None:
    told = choice.get("logprobs")
    if told and body["max_tokens"] > 2:
        told["token_logprobs"] = [p - 0.3 for p in told["token_logprobs"]]
        told["top_logprobs"] = [{text: p - 0.3 for text, p in top.items()} for top in told["top_logprobs"]]


def _shift_offsets(proxy: FaultyProxy, body: Json, choice: Json) -> None:
    if told := choice.get("logprobs"):
        told["text_offset"] = [offset + place for place, offset in enumerate(told["text_offset"])]


def _end_by_itself(proxy: FaultyProxy, body: Json, choice: Json) -> None:
    if choice["finish_reason"] == "length":
        choice["finish_reason"] = "stop"


def _another_seed(proxy: FaultyProxy, body: Json) -> None:
    if "seed" in body:
        body["seed"] = proxy.rng.getrandbits(40)


def _another_seed_in_company(proxy: FaultyProxy, body: Json) -> None:
    if proxy.under_way > 1:
        _another_seed(proxy, body)


def _remembers(proxy: FaultyProxy, body: Json) -> None:
    """After a longer prompt with the same beginning, what was left of it is read too."""
    last, prompt = proxy.last_prompt, body["prompt"]
    if isinstance(prompt, str) and isinstance(last, str) and last.startswith(prompt) and last != prompt:
        body["seed"] = body.get("seed", 0) + 77


def _count_one_more(proxy: FaultyProxy, body: Json, answer: Json) -> None:
    if usage := answer.get("usage"):
        usage["completion_tokens"] += 1
        usage["total_tokens"] += 1


def _copies(proxy: FaultyProxy, body: Json, answer: Json) -> None:
    for choice in answer["choices"][1:]:
        choice.update(answer["choices"][0] | {"index": choice["index"]})


def _without(name: str) -> Callable[[FaultyProxy, Json], None]:
    return lambda proxy, body: body.pop(name, None) and None


def _is_speculating(body: Json) -> bool:
    return body.get("speculation") is not False and isinstance(body["prompt"], str)


def _misread_when_speculating(proxy: FaultyProxy, body: Json) -> None:
    if _is_speculating(body) and body["temperature"] == 0:
        body["prompt"] += " and"


def _colder_when_speculating(proxy: FaultyProxy, body: Json) -> None:
    if _is_speculating(body) and body["temperature"] == 1 and "logprobs" not in body and body.get("n", 1) > 4:
        body["temperature"] = 0.5


def _repeat_a_chunk(proxy: FaultyProxy, events: list[Json]) -> None:
    events.insert(1, events[0])


FAULTS = {
    "one token in a hundred is biased": Fault("distribution against own logprobs", choice=_bias),
    "a character is lost before a stop": Fault("stop", choice=_drop_before_stop),
    # A server that lists tokens chunk by chunk lists some twice then.
    "a chunk is sent twice": Fault("streamed equals whole", events=_repeat_a_chunk, also=("usage",)),
    "a stream does not say that it is over": Fault(
        "streamed equals whole", done=False, also=("usage", "seed in a batch")
    ),
    "log probabilities are too low": Fault("logprobs", choice=_lower_logprobs),
    "the seed is ignored": Fault("seed alone", before=_another_seed),
    "the seed is ignored in batches": Fault("seed in a batch", before=_another_seed_in_company),
    "other traffic leaks in": Fault("seed after other traffic", before=_remembers),
    "a token too many is counted": Fault("usage", answer=_count_one_more),
    "answers are copies": Fault("n", answer=_copies),
    "penalties are ignored": Fault("penalties", before=_without("presence_penalty")),
    "the bias is ignored": Fault("logit_bias", before=_without("logit_bias")),
    "offsets drift": Fault("offsets", choice=_shift_offsets),
    "a cut answer claims to have ended": Fault("ends", choice=_end_by_itself),
    "speculation reads another prompt": Fault(
        "greedy with and without speculation", before=_misread_when_speculating, also=("logprobs",)
    ),
    "speculation draws colder": Fault(
        "distribution with and without speculation", before=_colder_when_speculating
    ),
}
