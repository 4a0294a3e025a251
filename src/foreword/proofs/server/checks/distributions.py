"""Checks of log-probabilities, and of the distributions of sampled tokens and texts."""

from collections import defaultdict
from math import exp, log
from typing import NamedTuple

import numpy as np

from foreword.proofs.server import evidence
from foreword.proofs.server.client import HALF, Body, ReceivedChoice, Server, ServerAnswer, Token
from foreword.proofs.server.comparing import draw
from foreword.proofs.server.context import (
    CONFIDENCE,
    ClaimStatus,
    ClaimVerdict,
    NotTried,
    ProofContext,
    Reproduction,
    held,
    refuted,
)

PLACES = 3  # number of tokens of an answer whose log-probabilities are requested again


async def logprobs(context: ProofContext) -> ClaimVerdict:
    """Check that lists of log-probabilities are consistent, and equal if the text is a prompt instead of an answer."""
    scored_tokens = 0
    for text in context.plan.texts:
        body = context.greedy(text)
        if context.abilities.token_ids:
            body["return_token_ids"] = True
        answer = await context.server.ask(body)
        fault = _logprob_fault(answer, context.tolerance) or await _plain_fault(context, body, answer)
        if fault is None:
            fault, scored = await _rescored(context, answer)
            scored_tokens += scored
        context.judged(text, answer)
        if fault is not None:
            return refuted(scored_tokens, f"{fault.got}, expected {fault.expected}", fault)
    if not scored_tokens:
        return held(len(context.plan.texts), "no token could be scored again")
    return held(scored_tokens, "tokens scored again")


async def _rescored(context: ProofContext, answer: ServerAnswer) -> tuple[Reproduction | None, int]:
    """Score `PLACES` tokens of an answer again, each after a prompt that includes the answer up to the token.

    Return the fault, if there is one, and how many tokens were scored.
    """
    tokens, scored = answer.first.tokens, 0
    evenly_spaced = {len(tokens) * k // (PLACES + 1) for k in range(1, PLACES + 1)}
    for index in sorted(evenly_spaced):
        prompt = _prefix(context, answer, index)
        again = await context.server.ask({**answer.body, "prompt": prompt, "max_tokens": 1})
        if not again.first.tokens or not _is_same_prefix(answer, again, index):
            continue  # the prompt has other tokens than the answer
        scored += 1
        if fault := _difference(tokens[index], again.first.tokens[0], context.tolerance):
            bodies = [{**answer.body, "max_tokens": index + 1}, dict(again.body)]
            return Reproduction(bodies, f"token {index}: {fault[0]}", f"re-scored: {fault[1]}"), scored
    return None, scored


async def _plain_fault(context: ProofContext, body: Body, answer: ServerAnswer) -> Reproduction | None:
    """Return a difference between the log-probabilities with and without speculation; None if there is none."""
    if context.plain is None:
        return None
    plain = await context.plain.ask(body)
    for index, (a, b) in enumerate(zip(answer.first.tokens, plain.first.tokens, strict=False)):
        if a.text != b.text:
            return None  # another check compares texts
        if fault := _difference(a, b, context.tolerance):
            bodies = [{**one.body, "max_tokens": index + 1} for one in (answer, plain)]
            return Reproduction(bodies, f"token {index}: {fault[0]}", f"without speculation: {fault[1]}")
    return None


def _prefix(context: ProofContext, answer: ServerAnswer, index: int) -> str | list[int]:
    """Return the prompt and the first `index` tokens of the answer, as token ids if the server accepts them."""
    ids = answer.first.token_ids
    if context.abilities.token_ids and ids and answer.prompt_ids:
        return [*answer.prompt_ids, *ids[:index]]
    return str(answer.body.get("prompt", "")) + "".join(token.text for token in answer.first.tokens[:index])


def _is_same_prefix(answer: ServerAnswer, again: ServerAnswer, index: int) -> bool:
    """Return whether the prompt of `again` certainly has the tokens of the answer and of its prompt."""
    if isinstance(again.body.get("prompt"), list):
        return True
    if "messages" in again.body or answer.usage is None or again.usage is None:
        return False
    return again.usage.prompt == answer.usage.prompt + index


def _logprob_fault(answer: ServerAnswer, tolerance: float) -> Reproduction | None:
    """Return an inconsistency in the lists of log-probabilities of a greedy answer; None if there is none."""
    for index, token in enumerate(answer.first.tokens):
        if not token.top:
            continue
        mass = sum(exp(logprob) for _, logprob in token.top)
        best = token.top[0][1]
        listed = f"token {index}: {token.text!r} {token.logprob:.3f}"
        bodies = [{**answer.body, "max_tokens": index + 1}]
        if mass > 1 + tolerance:
            return Reproduction(bodies, f"token {index}: chances of {mass:.3f} in all", "at most 1")
        if HALF not in token.text and abs(token.logprob - best) > tolerance:
            return Reproduction(bodies, listed, f"greedy takes the largest, {token.top[0][0]!r} {best:.3f}")
    return None


def _difference(one: Token, other: Token, tolerance: float) -> tuple[str, str] | None:
    """Return both log-probabilities of a likely token if they differ by more than rounding; otherwise None."""
    known = dict(other.top)
    for text, logprob in ((one.text, one.logprob), *one.top[:3]):
        if HALF not in text and text in known and logprob > -3 and abs(known[text] - logprob) > tolerance:
            return f"{text!r} {logprob:.4f}", f"{known[text]:.4f}"
    return None


EVENTS = ("the likeliest token", "the second", "the third to fifth", "a token that is not listed")
_RANKS = ((0, 1), (1, 2), (2, 5))  # ranks [begin, end) of the listed tokens of all events but the last


async def own_distribution(context: ProofContext) -> ClaimVerdict:
    """Compare the tokens of many answers at temperature 1 with the server's log-probabilities."""
    drawn = _Drawn()
    async for prompt, answer, choice in draw(context, context.server, context.plan.depth, 1, logprobs=True):
        drawn.bodies.setdefault(prompt, dict(answer.body))
        drawn.add(prompt, choice)
    chances, happened = drawn.arrays(drawn.rows)
    log_evidence, alarm = evidence.log_evidence(chances, happened), log(1 / evidence.OWN_LOGPROBS)
    bias = evidence.visible_bias(chances[:, 0], len(EVENTS) * len(evidence.BETS), evidence.OWN_LOGPROBS)
    if log_evidence >= alarm:
        if drawn.hidden_ends / max(len(drawn.rows), 1) > bias / 4:
            raise NotTried("the server lists no end token, whose chance is then not known")
        return _refuted_distribution(drawn, log_evidence)
    detail = (
        f"evidence e^{log_evidence:.1f} of e^{alarm:.1f}; TV of first tokens ≤ {drawn.first_distance():.3f}"
    )
    visible = f"a total variation of {bias:.2%} towards {EVENTS[0]} ({CONFIDENCE:.0%})"
    return ClaimVerdict(ClaimStatus.NOT_REFUTED, len(chances), detail, visible)


def _refuted_distribution(drawn: "_Drawn", log_evidence: float) -> ClaimVerdict:
    """Return a refutation with the prompt whose tokens have the most evidence, and with the fewest tokens."""
    by_prompt = defaultdict(list)
    for row in drawn.rows:
        by_prompt[row.prompt].append(row)
    prompt = max(by_prompt, key=lambda text: evidence.log_evidence(*drawn.arrays(by_prompt[text])))
    rows = by_prompt[prompt]
    for depth in range(1, max(row.position for row in rows) + 2):
        rows = [row for row in by_prompt[prompt] if row.position < depth]
        if evidence.log_evidence(*drawn.arrays(rows)) >= log(1 / evidence.OWN_LOGPROBS):
            break
    chances, happened = drawn.arrays(rows)
    event = int(evidence.gains(chances, happened).max(axis=1).argmax())
    body = {**drawn.bodies[prompt], "max_tokens": depth}
    body.pop("seed")  # one seed cannot show the fault
    count, expected = happened[:, event].sum(), chances[:, event].sum()
    got = f"in {len(rows)} draws {EVENTS[event]} came {count} times"
    too = "often" if count > expected else "seldom"
    detail = f"evidence e^{log_evidence:.1f}, {EVENTS[event]} came too {too}"
    return refuted(len(drawn.rows), detail, Reproduction([body], got, f"{expected:.0f} times"))


class _DrawnToken(NamedTuple):
    """A sampled token, and the server's probability of each of EVENTS."""

    prompt: str
    position: int  # index in the answer
    chances: tuple[float, ...]  # probability of each event
    happened: tuple[bool, ...]  # whether the event happened


class _Drawn:
    """Sampled tokens of all answers, and the first tokens by prompt."""

    def __init__(self) -> None:
        self.rows: list[_DrawnToken] = []
        self.bodies: dict[str, dict[str, object]] = {}
        self._firsts: dict[str, list[Token]] = defaultdict(list)
        self.hidden_ends = 0  # number of answers whose end token is not listed

    def add(self, prompt: str, choice: ReceivedChoice) -> None:
        listed = "".join(token.text for token in choice.tokens)
        if choice.finish_reason == "stop" and listed == choice.text:
            self.hidden_ends += 1
        for index, token in enumerate(choice.tokens):
            if token.top:
                self.rows.append(_DrawnToken(prompt, index, *_events(token)))
        if choice.tokens and choice.tokens[0].top:
            self._firsts[prompt].append(choice.tokens[0])

    def arrays(
        self, rows: list[_DrawnToken]
    ) -> tuple[evidence.Floats, "np.ndarray[tuple[int, int], np.dtype[np.bool_]]"]:
        """Return the probabilities of the events, and whether they happened, [rows, events] each."""
        chances = np.array([row.chances for row in rows]).reshape(-1, len(EVENTS))
        happened = np.array([row.happened for row in rows]).reshape(-1, len(EVENTS))
        return np.clip(chances, 0.0, 1.0), happened

    def first_distance(self) -> float:
        """Return the largest bound on the total variation of a prompt's first token."""
        return max((_first_distance(tokens) for tokens in self._firsts.values()), default=1.0)


def _events(token: Token) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    """Return the probability of each of EVENTS, and whether the token makes it happen."""
    rank = _rank(token)
    chances = [sum(exp(p) for _, p in token.top[a:b]) for a, b in _RANKS]
    happened = [rank is not None and a <= rank < b for a, b in _RANKS]
    listed = sum(exp(p) for _, p in token.top)
    return (*chances, 1 - listed), (*happened, rank is None)


def _rank(token: Token) -> int | None:
    """Return the token's rank in the list; log-probabilities tell tokens with the same text apart."""
    for rank, (text, logprob) in enumerate(token.top):
        if text == token.text and abs(logprob - token.logprob) < 1e-6:
            return rank
    return None


def _first_distance(tokens: list[Token]) -> float:
    """Return the bound on the total variation of one prompt's first tokens, by rank; all others are one cell."""
    cells = len(tokens[0].top)
    counts = np.zeros(cells + 1)
    for token in tokens:
        rank = _rank(token)
        counts[cells if rank is None else min(rank, cells)] += 1
    probabilities = np.array([exp(p) for _, p in tokens[0].top])
    return evidence.most_distance(counts, np.append(probabilities, max(0.0, 1 - probabilities.sum())))


DEPTH = 3  # tokens per compared text, which are few because each longer text is too rare to compare


async def without_speculation(context: ProofContext) -> ClaimVerdict:
    """Sample short texts with and without speculation, by prompt."""
    assert context.plain is not None
    with_it = await _texts(context, context.server, 2)
    without = await _texts(context, context.plain, 3)
    alarm = evidence.WITHOUT_SPECULATION / len(with_it)
    contrasts = {prompt: evidence.contrast(without[prompt], texts) for prompt, texts in with_it.items()}
    prompt = min(contrasts, key=lambda text: contrasts[text].p)
    largest, draws = contrasts[prompt], len(with_it[prompt])
    if largest.p < alarm:
        return _refuted_texts(context, prompt, largest, len(with_it) * draws)
    shift = evidence.visible_shift(0.25, draws, alarm)
    visible = f"a text of a quarter's chance that is off by {shift:.1%} ({CONFIDENCE:.0%})"
    detail = f"smallest p {largest.p:.2g} of {alarm:.1g}"
    return ClaimVerdict(ClaimStatus.NOT_REFUTED, 2 * len(with_it) * draws, detail, visible)


def _refuted_texts(
    context: ProofContext, prompt: str, contrast: evidence.Contrast, tried: int
) -> ClaimVerdict:
    body = context.server.wire_body(context.sampled(prompt, 0, max_tokens=DEPTH, n=context.abilities.n))
    body.pop("seed")
    without, with_it = contrast.counts
    shown = Reproduction(
        [body], f"{contrast.cell!r} {with_it} times with speculation", f"{without} times as without"
    )
    detail = (
        f"{contrast.cell!r} has another chance with speculation (p = e^{log(max(contrast.p, 1e-300)):.0f})"
    )
    return refuted(tried, detail, shown)


async def _texts(context: ProofContext, server: Server, stream_of_seeds: int) -> dict[str, list[str]]:
    drawn: dict[str, list[str]] = {text: [] for text in context.plan.texts}
    async for prompt, _, choice in draw(context, server, DEPTH, stream_of_seeds, logprobs=False):
        drawn[prompt].append(choice.text)
    return drawn
