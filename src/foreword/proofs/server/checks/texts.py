"""Checks of token counts, offsets, stop texts and finish reasons."""

import re
from collections.abc import AsyncIterator

from foreword.proofs.server.client import HALF, Body, ServerAnswer
from foreword.proofs.server.comparing import Fault, brief, smallest_fault
from foreword.proofs.server.context import ClaimVerdict, NotTried, ProofContext, Reproduction, held, refuted

_CONTROL_TOKEN = re.compile(r"<\|[^|]*\|>")


async def usage(context: ProofContext) -> AsyncIterator[Fault | None]:
    """Check the usage of complete and streamed answers of several lengths."""
    for seed, text in enumerate(context.plan.texts):
        for tokens in (1, context.plan.tokens - 3):
            body = context.with_logprobs(context.sampled(text, seed, max_tokens=tokens))
            complete, streamed = await context.server.ask(body), await context.server.stream(body)
            context.judged(text, complete, streamed)
            if complete.usage is None:
                raise NotTried("the server tells no usage")
            other = streamed.usage
            faults = _usage_fault(complete), _usage_fault(streamed)
            if not any(faults) and other is not None and complete.usage.prompt != other.prompt:
                faults = "", f"a prompt of {complete.usage.prompt} tokens has {other.prompt} in a stream"
            for fault in faults:
                if fault:
                    yield await smallest_fault(context, body, fault, _usage_fault, _usage_text)
                else:
                    yield None


def _usage_text(answer: ServerAnswer) -> str:
    return f"{answer.usage} of {brief(answer)}"


def _usage_fault(answer: ServerAnswer) -> str:
    """Return the fault of an answer's usage; empty if there is none."""
    usage = answer.usage
    if usage is None:  # optional in streams
        return ""
    if usage.total != usage.prompt + usage.completion:
        return f"{usage.prompt} and {usage.completion} tokens are not {usage.total}"
    most = answer.body["max_tokens"] * len(answer.choices)
    listed = sum(len(choice.tokens) for choice in answer.choices.values())
    if listed and listed != usage.completion:
        return f"{listed} tokens came, {usage.completion} are counted"
    is_cut = all(choice.finish_reason == "length" for choice in answer.choices.values())
    if usage.completion > most or (is_cut and usage.completion != most):
        return f"{usage.completion} tokens are counted of answers cut at {most}"
    return ""


async def offsets(context: ProofContext) -> AsyncIterator[Fault | None]:
    """Check the offsets and the listed tokens of greedy and sampled answers."""

    def got(answer: ServerAnswer) -> str:
        tokens = [token.text for token in answer.first.tokens]
        return f"{tokens[:12]} at {answer.first.offsets[:12]} of {answer.text[:80]!r}"

    for seed, text in enumerate(context.plan.texts):
        for body in (context.greedy(text), context.with_logprobs(context.sampled(text, seed))):
            answer = await context.server.ask(body)
            context.judged(text, answer)
            fault = _offset_fault(answer)
            if fault:
                yield await smallest_fault(context, body, fault, _offset_fault, got)
            else:
                yield None


def _offset_fault(answer: ServerAnswer) -> str:
    """Return the fault of an answer's offsets or listed tokens; empty if there is none."""
    choice = answer.first
    texts = [token.text for token in choice.tokens]
    if not texts:  # a request without log-probabilities
        return ""
    listed = len(choice.offsets)
    for index in range(min(listed, len(texts)) - 1):
        step = choice.offsets[index + 1] - choice.offsets[index]
        if HALF not in texts[index] and step != len(texts[index]):
            return f"token {index} has {len(texts[index])} characters, the next is {step} further"
    joined = "".join(texts)
    if HALF in joined + choice.text:
        return ""
    # A text may lack its leading space, control tokens, and the tokens of its end.
    plain = "".join(text for text in texts if not _CONTROL_TOKEN.fullmatch(text))
    text, is_stopped = choice.text.strip(), choice.finish_reason == "stop"
    for spelled in (joined, plain):
        if spelled.strip() == text or (is_stopped and spelled.lstrip().startswith(text)):
            return ""
    return "the listed tokens do not spell the text"


STOPS = 3  # number of pieces of an answer that are used as stop texts


async def stops(context: ProofContext) -> AsyncIterator[Fault | None]:
    """Repeat requests with a piece of the known answer as stop text; the answer must end before it."""
    for seed, text in enumerate(context.plan.texts):
        body = context.sampled(text, seed)
        unstopped = await context.server.ask(body)
        context.judged(text, unstopped)
        for stop, index in _stops(unstopped.text):
            for ask in (context.server.ask, context.server.stream):
                answer = await ask({**body, "stop": [stop]})
                context.judged(text, answer)
                expected = unstopped.text[:index]
                if (answer.text, answer.first.finish_reason) != (expected, "stop"):
                    fault = f"with the stop {stop!r} the text is not what stands before it"
                    small = {**answer.body, **await _smaller(context, body, stop, index)}
                    yield fault, Reproduction([small], brief(answer), f"{expected[-120:]!r} (stop)")
                yield None


async def _smaller(context: ProofContext, body: Body, stop: str, index: int) -> Body:
    """Return the smallest `max_tokens` (a power of two) that reaches the stop text, as a field of the request."""
    tokens = 1
    while tokens < body["max_tokens"]:
        if len((await context.server.ask({**body, "max_tokens": tokens})).text) >= index + len(stop):
            return {"max_tokens": tokens}
        tokens *= 2
    return {}


def _stops(text: str) -> list[tuple[str, int]]:
    """Return evenly spaced pieces of the text, with the index of their first occurrence."""
    pieces: dict[int, str] = {}  # by index of the first occurrence
    for number in range(1, STOPS + 1):
        begin = len(text) * number // (STOPS + 1)
        length = 1 if number == 2 else 3
        piece = text[begin : begin + length]
        if piece.strip() and HALF not in piece:
            pieces[text.index(piece)] = piece
    return [(piece, index) for index, piece in pieces.items() if index > 0]


MORE = 8  # number of tokens by which the repeated request's limit is larger


async def ends(context: ProofContext) -> ClaimVerdict:
    """Repeat with a larger limit. The text must be equal if it had ended, and continue if it was cut."""
    tried = ended = 0
    for seed, text in enumerate(context.plan.texts):
        for tokens in (context.plan.tokens // 2, context.plan.tokens):
            body = context.sampled(text, seed, max_tokens=tokens)
            answer = await context.server.ask(body)
            longer = await context.server.ask({**body, "max_tokens": tokens + MORE})
            context.judged(text, answer, longer)
            tried += 1
            ended += answer.first.finish_reason == "stop"
            if fault := _end_fault(answer, longer):
                got = f"{brief(answer)}, then {brief(longer)}"
                return refuted(tried, fault, Reproduction([answer.body, longer.body], got, fault))
    return held(tried, f"{ended} ended by themselves")


def _end_fault(answer: ServerAnswer, longer: ServerAnswer) -> str:
    """Return how the answer contradicts the one with the larger limit; empty: it does not."""
    reason, text, more = answer.first.finish_reason, answer.text, longer.text
    if reason not in ("stop", "length"):
        return f"finish_reason must be stop or length, not {reason!r}"
    if reason == "stop" and (more, longer.first.finish_reason) != (text, "stop"):
        return "it had ended (stop), and more room must change nothing"
    # The last character of a cut text may be incomplete.
    if reason == "length" and not more.startswith(text.rstrip(HALF)):
        return "it was cut (length), and with more room it must go on from there"
    counted, room = answer.usage, answer.body["max_tokens"]
    if reason == "length" and counted is not None and counted.completion < room:
        return f"it says that it was cut at {room} tokens, and has {counted.completion}"
    return ""
