"""Tokens are drawn with the chances that the server tells."""

from collections import defaultdict
from math import exp, log
from typing import ClassVar

import numpy as np

from foreword.proofs.server.alarms import OWN_LOGPROBS
from foreword.proofs.server.answer import Choice, Token
from foreword.proofs.server.drawing import draw, requests_for
from foreword.proofs.server.evidence import BETS, Floats, distance, gains, log_evidence, visible_bias
from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import CONFIDENCE, Outcome, Reproduction, Verdict, not_tried, refuted

EVENTS = ("the likeliest token", "the second", "the third to fifth", "a token that is not listed")
_RANKS = ((0, 1), (1, 2), (2, 5))


class OwnLaw:
    """The first tokens of many answers at temperature 1, each against the list that came with it."""

    name: ClassVar[str] = "distribution against own logprobs"
    claim: ClassVar[str] = (
        "at temperature 1 tokens are drawn with the chances that the server's log probabilities tell"
    )
    rests_on: ClassVar[tuple[str, ...]] = ("logprobs", "n")

    def cost(self, ground: Ground) -> int:
        return requests_for(ground) if ground.abilities.logprobs else 0

    async def examine(self, ground: Ground) -> Verdict:
        if not ground.abilities.logprobs:
            return not_tried(self.name, "the server lists no log probabilities")
        drawn = _Drawn()
        async for prompt, answer, choice in draw(ground, ground.server, ground.plan.depth, 1, logprobs=True):
            drawn.bodies.setdefault(prompt, dict(answer.body))
            drawn.add(prompt, choice)
        chances, happened = drawn.arrays(drawn.rows)
        seen = log_evidence(chances, happened)
        bias = visible_bias(chances[:, 0], len(EVENTS) * len(BETS), OWN_LOGPROBS)
        if seen >= log(1 / OWN_LOGPROBS):
            if drawn.hidden_ends / max(len(drawn.rows), 1) > bias / 4:
                return not_tried(self.name, "the server lists no end token, whose chance is then not known")
            return self._refuted(drawn, seen)
        upper = drawn.first_distance()
        detail = f"evidence e^{seen:.1f} of e^{log(1 / OWN_LOGPROBS):.1f}; TV of first tokens ≤ {upper:.3f}"
        visible = f"a total variation of {bias:.2%} towards {EVENTS[0]} ({CONFIDENCE:.0%})"
        return Verdict(self.name, Outcome.NOT_REFUTED, len(chances), detail, visible)

    def _refuted(self, drawn: "_Drawn", seen: float) -> Verdict:
        """The prompt, and the fewest tokens of its answers, in which it shows most."""
        by_prompt = defaultdict(list)
        for row in drawn.rows:
            by_prompt[row[0]].append(row)
        prompt = max(by_prompt, key=lambda text: log_evidence(*drawn.arrays(by_prompt[text])))
        rows = by_prompt[prompt]
        for depth in range(1, max(row[1] for row in rows) + 2):
            rows = [row for row in by_prompt[prompt] if row[1] < depth]
            if log_evidence(*drawn.arrays(rows)) >= log(1 / OWN_LOGPROBS):
                break
        chances, happened = drawn.arrays(rows)
        event = int(gains(chances, happened).max(axis=1).argmax())
        body = {**drawn.bodies[prompt], "max_tokens": depth}
        body.pop("seed")  # it takes many
        told = f"in {len(rows)} draws {EVENTS[event]} came {happened[:, event].sum()} times"
        shown = Reproduction([body], told, f"{chances[:, event].sum():.0f} times")
        detail = f"evidence e^{seen:.1f}, {EVENTS[event]} came too " + (
            "often" if happened[:, event].sum() > chances[:, event].sum() else "seldom"
        )
        return refuted(self.name, len(drawn.rows), detail, shown)


Row = tuple[str, int, tuple[float, ...], tuple[bool, ...]]
"""Prompt, place, chances of the events, which of them happened."""


class _Drawn:
    """All draws, and the first tokens by prompt."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.bodies: dict[str, dict[str, object]] = {}
        self._firsts: dict[str, list[Token]] = defaultdict(list)
        self.hidden_ends = 0  # answers whose end token is not among the listed ones

    def add(self, prompt: str, choice: Choice) -> None:
        listed = "".join(token.text for token in choice.tokens)
        self.hidden_ends += choice.finish_reason == "stop" and listed == choice.text
        for place, token in enumerate(choice.tokens):
            if token.top:
                self.rows.append((prompt, place, *_events(token)))
        if choice.tokens and choice.tokens[0].top:
            self._firsts[prompt].append(choice.tokens[0])

    def arrays(self, rows: list[Row]) -> tuple[Floats, "np.ndarray[tuple[int, int], np.dtype[np.bool_]]"]:
        chances = np.array([row[2] for row in rows]).reshape(-1, len(EVENTS))
        return np.clip(chances, 0.0, 1.0), np.array([row[3] for row in rows]).reshape(-1, len(EVENTS))

    def first_distance(self) -> float:
        """The largest bound of any prompt on the total variation of its first token."""
        return max((_first_distance(tokens) for tokens in self._firsts.values()), default=1.0)


def _events(token: Token) -> tuple[tuple[float, ...], tuple[bool, ...]]:
    rank = _rank(token)
    chances = [sum(exp(p) for _, p in token.top[a:b]) for a, b in _RANKS]
    happened = [rank is not None and a <= rank < b for a, b in _RANKS]
    listed = sum(exp(p) for _, p in token.top)
    return (*chances, 1 - listed), (*happened, rank is None)


def _rank(token: Token) -> int | None:
    """Its place in the list; tokens of one text are told apart by their numbers."""
    for rank, (text, logprob) in enumerate(token.top):
        if text == token.text and abs(logprob - token.logprob) < 1e-6:
            return rank
    return None


def _first_distance(tokens: list[Token]) -> float:
    cells = len(tokens[0].top)
    counts = np.zeros(cells + 1)
    for token in tokens:
        rank = _rank(token)
        counts[cells if rank is None else min(rank, cells)] += 1
    law = np.array([exp(p) for _, p in tokens[0].top])
    return distance(counts, np.append(law, max(0.0, 1 - law.sum()))).upper
