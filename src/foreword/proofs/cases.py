"""Random requests, synthetic targets and small drafters, on which the proofs run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import count

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.noise import gumbel, key_tensor
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.reference import mix, probabilities
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Drawn, Floats
from foreword.structured.compiled import GrammarTokens
from foreword.structured.compiler import Grammars
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarError, unpacked

TARGET_SALT = 0x5EED

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A request with its parameters, and the synthetic target that answers it."""

    params: SamplingParams
    limits: TokenLimits
    prompt: tuple[int, ...]
    seed: int
    target: int  # identifies the function from history to logits
    sample: int = 0
    rule: Rule = Rule.COUPLED
    spread: float = 2.0  # spread of the target's logits
    grid: float = 0.0  # logits are rounded to multiples of this, so that some tie; 0: no rounding

    def sampler(self) -> RequestSampler:
        """Return a new sampler for the request."""
        wanted = self.params.structured
        return RequestSampler(
            self.params,
            self.limits,
            self.prompt,
            self.seed,
            sample=self.sample,
            rule=self.rule,
            grammar=None if wanted is None else letter_grammars(self.limits).begin(wanted),
        )

    def allowed(self, generated: Sequence[int]) -> frozenset[int] | None:
        """Return the tokens that the grammar allows after these; None: all."""
        if self.params.structured is None:
            return None
        return _allowed_after(self.limits, self.params.structured, tuple(generated))


@cache
def letter_grammars(limits: TokenLimits) -> Grammars:
    """Return a compiler of grammars for a small vocabulary: the letters a, b, ... and the end tokens."""
    letters = (bytes([ord("a") + index]) for index in count())
    pieces = [b"<end>" if token in limits.end_ids else next(letters) for token in range(limits.vocab_size)]

    def encode(text: str) -> list[int]:
        return [pieces.index(bytes([byte])) for byte in text.encode()]

    tokens = GrammarTokens(pieces, limits.end_ids, encode, limits.end_ids)
    return Grammars(lambda: tokens, clock=lambda: 0.0)  # a pause of the machine must not end a request


@cache
def _allowed_after(
    limits: TokenLimits, wanted: StructuredOutputs, generated: tuple[int, ...]
) -> frozenset[int]:
    state = letter_grammars(limits).begin(wanted)
    try:
        for token in generated:
            state.commit([token])
    except GrammarError:  # the grammar does not allow this text; only drafters write such texts
        return frozenset(range(limits.vocab_size))
    return frozenset(np.flatnonzero(unpacked(state.masks((), ()), limits.vocab_size)[0]).tolist())


def target_logits(cases: Sequence[Case], histories: Sequence[Sequence[Sequence[int]]]) -> Tensor:
    """Return each case's logits after each of its histories, as float32 [all histories, widest vocabulary].

    They are noise, keyed by a hash of the target and the history: a pure function of both.
    """
    vocabs = torch.tensor([case.limits.vocab_size for case in cases])
    keys = [
        history_key(case.target, history)
        for case, of_case in zip(cases, histories, strict=True)
        for history in of_case
    ]
    case_of_row = torch.repeat_interleave(torch.tensor([len(of_case) for of_case in histories]))
    ids = torch.arange(int(vocabs.max())).expand(len(keys), -1)
    noise = gumbel(key_tensor(np.array(keys, np.uint64))[:, None].expand_as(ids), ids)
    grid = torch.tensor([case.grid for case in cases])[case_of_row, None]
    logits = noise * torch.tensor([case.spread for case in cases])[case_of_row, None]
    logits = torch.where(grid > 0, (logits / grid).round() * grid, logits)
    return logits.float().masked_fill(ids >= vocabs[case_of_row, None], -torch.inf)


def history_key(target: int, history: Sequence[int]) -> int:
    """Return a hash of the target's number and the whole history."""
    key = mix(target ^ TARGET_SALT)
    for token in history:
        key = mix(key ^ (token + 1))
    return key


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    """Return random sampling parameters for a vocabulary of this size; each is off in about half of the cases."""

    def maybe(on: float, off: float) -> float:
        return on if rng.random() < 0.5 else off

    allowed = None
    if rng.random() < 0.2:
        allowed = tuple(int(i) for i in rng.choice(vocab, max(3, vocab // 2), replace=False))
    bias = {int(i): float(rng.normal() * 2) for i in rng.choice(vocab, 2, replace=False)}
    return SamplingParams(
        temperature=float(rng.choice([0.0, 0.3, 0.7, 1.0, 1.8])),
        top_p=maybe(float(rng.uniform(0.2, 0.99)), 1.0),
        top_k=int(maybe(int(rng.integers(1, vocab)), 0)),
        min_p=maybe(float(rng.uniform(0.0, 0.4)), 0.0),
        presence_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
        frequency_penalty=maybe(float(rng.uniform(-1, 2)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.7, 1.8)), 1.0),
        logit_bias=bias if rng.random() < 0.5 else {},
        allowed_token_ids=allowed,
        min_tokens=int(maybe(3, 0)),
    )


def random_case(rng: np.random.Generator, rule: Rule = Rule.COUPLED) -> Case:
    """Return a request with random, consistent parameters and a random target."""
    vocab = int(rng.integers(6, 24))
    params = random_params(rng, vocab)
    free = set(params.allowed_token_ids or range(vocab))
    end = int(rng.integers(vocab))
    words = [
        tuple(int(t) for t in rng.integers(0, vocab, rng.integers(2, 4))) for _ in range(rng.integers(0, 4))
    ]
    if rng.random() < 0.3:
        words.append((int(rng.integers(vocab)),))
    banned = {end, *(word[-1] for word in words)}  # tokens that `min_tokens` or a bad word may ban
    is_consistent = bool(free - banned)  # whether some token is always allowed
    limits = TokenLimits(vocab, (end,), tuple(words) if is_consistent else ())
    if not is_consistent:
        params = SamplingParams(temperature=params.temperature)
    prompt = tuple(int(t) for t in rng.integers(0, vocab, rng.integers(1, 9)))
    seed, target = (int(word) for word in rng.integers(0, 2**63, 2))
    grid = 0.5 if rng.random() < 0.2 else 0.0
    return Case(params, limits, prompt, seed, target, int(rng.integers(0, 4)), rule, 2.0, grid)


class DraftKind(Enum):
    """Source of a drafter's tokens."""

    DRAWN = "drawn"  # from a full distribution
    SPARSE = "q with zeros"  # from a distribution that lacks some of the target's tokens
    SAME = "q = p"  # from the target's own distribution
    CHOSEN = "chosen"  # the most likely token, without q
    MIXED = "mixed"  # chosen and drawn in turns


@dataclass(frozen=True)
class SmallDrafter:
    """A drafter whose distribution q mixes the target's with an unrelated one."""

    case: Case  # the drafted request
    kind: DraftKind
    likeness: float = 0.5  # weight of the target's distribution
    _known: dict[tuple[int, ...], Floats] = field(default_factory=dict, repr=False, compare=False)

    def probabilities(self, history: tuple[int, ...]) -> Floats:
        """Return q [vocab] after a history, which includes the prompt."""
        if history not in self._known:
            self._known[history] = self._probabilities(history)
        return self._known[history].copy()

    def _probabilities(self, history: tuple[int, ...]) -> Floats:
        generated = history[len(self.case.prompt) :]
        unrelated = Case(self.case.params, self.case.limits, self.case.prompt, 0, self.case.target ^ 1)
        case, allowed = self.case, self.case.allowed(generated)
        logits, others = target_logits([case, unrelated], [[history], [history]]).tolist()
        p = probabilities(logits, case.params, case.limits, case.prompt, generated, allowed)
        weights, likeness = np.exp(others), 1.0 if self.kind is DraftKind.SAME else self.likeness
        q = likeness * np.array(p) + (1 - likeness) * (weights / weights.sum())
        if self.kind is DraftKind.SPARSE:
            missing = np.argmax(q) if len(generated) % 2 else np.argmin(q)
            q[missing] = 0
        return np.asarray(q / q.sum(), np.float64)

    def next_tokens(
        self, history: tuple[int, ...], without: tuple[int, ...] = ()
    ) -> Iterator[tuple[int, Drawn | None, float]]:
        """Yield every possible draft token after a history, with its q (None: chosen) and its probability.

        Tokens in `without` are earlier siblings, which are not drafted again.
        """
        q = self.probabilities(history)
        q[list(without)] = 0
        if not q.any():
            return
        q /= q.sum()
        is_chosen_now = self.kind is DraftKind.MIXED and len(history) % 2 == 0
        if self.kind is DraftKind.CHOSEN or is_chosen_now:
            yield int(np.argmax(q)), None, 1.0
            return
        support = np.flatnonzero(q)
        drawn = Drawn(support, q[support])
        for token in support:
            yield int(token), drawn, float(q[token])


@dataclass(frozen=True)
class PossibleTree:
    """A possible draft and its probability; it has fewer nodes than its shape if q has too few tokens."""

    tokens: Tokens = ()
    parents: tuple[int, ...] = ()  # of each node; -1: none
    drawn: tuple[Drawn | None, ...] = ()  # q of each node; None: chosen
    probability: float = 1.0

    def path(self, node: int) -> Tokens:
        """Return the tokens from the first level to a node."""
        return () if node < 0 else (*self.path(self.parents[node]), self.tokens[node])

    def grown(self, token: int, parent: int, q: Drawn | None, chance: float) -> "PossibleTree":
        """Return the tree with one more node, which is drafted with probability `chance`."""
        return PossibleTree(
            (*self.tokens, token), (*self.parents, parent), (*self.drawn, q), self.probability * chance
        )
