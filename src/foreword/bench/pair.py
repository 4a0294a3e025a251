"""Compares a draft model's next-token distributions with its target's, and measures its acceptance under each rule."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from operator import mul
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from foreword.acceptance.params import SamplingParams
from foreword.bench.drafters.decode import DecodeRun, decode
from foreword.bench.prompts import BenchPrompt
from foreword.bench.quality import log_probabilities
from foreword.bench.skeleton import PLAIN, InTable, staged
from foreword.bench.theory import DraftingCost, RelativeStepCurve, pass_cost
from foreword.drafters.model.vocabularies import check_same_vocabulary
from foreword.engine.assembly import make_core
from foreword.engine.config import EngineConfig
from foreword.engine.loader import LoadedModel
from foreword.engine.prompts import encode_prompt
from foreword.errors import RequestError
from foreword.progress import StageProgress


@dataclass(frozen=True)
class Divergence:
    """How far the distribution q of a draft model is from the distribution p of its target: means over positions."""

    places: int  # number of positions
    tv: float  # total variation, ½ Σ |p − q|
    kl: float | None  # KL(p || q) in nats; None at temperature 0, where it may be infinite
    same_top: float  # fraction of positions with the same most likely token
    token: float  # acceptance by *token*, and of the first token by *block*: 1 − TV
    coupled: float  # acceptance by *coupled*, with shared noise
    chosen: float  # acceptance of the draft model's most likely token


def distributions(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities, float64 [positions, vocab]; at temperature 0 the most likely token has probability 1."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(-1)


def divergence(target: Tensor, draft: Tensor, temperature: float) -> Divergence:
    """Compare the logits [positions, vocab] of both models on the same texts."""
    p, q = distributions(target, temperature), distributions(draft, temperature)
    tv = (p - q).abs().sum(-1) / 2
    kl = None if temperature == 0 else float((p * (p.log() - q.log())).nansum(-1).clamp(min=0).mean())
    return Divergence(
        places=len(p),
        tv=float(tv.mean()),
        kl=kl,
        same_top=float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        token=float((1 - tv).mean()),
        coupled=float(coupled_agreement(p, q).mean()),
        chosen=float(p.gather(-1, q.argmax(-1, keepdim=True)).mean()),
    )


def coupled_agreement(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that argmax(log p + G) = argmax(log q + G) for shared Gumbel noise G, [positions].

    Token v is both argmaxes with probability 1 / Σ_u max(p_u / p_v, q_u / q_v). The first ratio is the larger one if
    p_u / q_u > p_v / q_v. So in the order of p / q, tokens up to v contribute q, and tokens after v contribute p.
    """
    order = torch.where(q > 0, p / q, torch.inf).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    q_until = q.cumsum(-1)
    p_after = (p.sum(-1, keepdim=True) - p.cumsum(-1)).clamp(min=0)
    is_possible = (p > 0) & (q > 0)
    return torch.where(is_possible, 1 / (p_after / p + q_until / q), 0.0).sum(-1)


def combined(parts: Sequence[Divergence]) -> Divergence:
    """Return the means over all positions of several texts; a figure that is None stays None."""
    places, *columns = zip(*map(astuple, parts), strict=True)
    total = sum(places)
    means: list[Any] = [
        None if None in column else sum(map(mul, column, places)) / total for column in columns
    ]
    return Divergence(total, *means)


TEMPERATURES = (0.0, 0.7, 1.0)
RULES = ("coupled", "token", "block")


@dataclass(frozen=True)
class PairSettings:
    """Size of the measurement."""

    max_tokens: int = 48  # per answer
    guesses: int = 5  # per draft
    seed: int = 0


@dataclass(frozen=True)
class KindDivergence:
    """Divergence for one category at one temperature."""

    kind: str
    temperature: float
    divergence: Divergence


class RuleAnswer(NamedTuple):
    """One answer of the engine, or the sum of several."""

    rule: str  # acceptance rule, or plain
    temperature: float
    kind: str  # category of the prompt
    run: DecodeRun


@dataclass(frozen=True)
class Expectation:
    """Expected gain of drafts of k tokens, from measured acceptance and times."""

    rule: Annotated[str, InTable("rule")]
    temperature: Annotated[float, InTable("T", "g")]
    k: Annotated[int, InTable("draft tokens")]
    tokens_per_pass: Annotated[float, InTable("tokens per pass", ".2f")]
    cost: Annotated[float, InTable("cost in plain passes", ".2f")]  # of a draft and its pass
    speedup: Annotated[float, InTable("speed-up", ".2f")]


class PairBench:
    """A target and a draft model with the same vocabulary, both loaded."""

    def __init__(
        self, target: LoadedModel, draft: LoadedModel, draft_name: str, settings: PairSettings
    ) -> None:
        check_same_vocabulary(target.checkpoint, draft.checkpoint)
        self._target, self._draft = target, draft
        self._context = min(model.decoder.config.context_length for model in (target, draft))
        drafter = {"method": "draft_model", "model": draft_name, "fixed": True}
        self._speculation = {**drafter, "num_speculative_tokens": settings.guesses}
        self._settings = settings

    def run(
        self, prompts: Sequence[BenchPrompt], progress: StageProgress
    ) -> tuple[list[KindDivergence], list[RuleAnswer]]:
        """Return the divergences by category and temperature, and all answers by rule, temperature and category."""
        tokenizer, context = self._target.tokenizer, self._context
        encoded = [(prompt.category, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
        encoded = [(kind, ids) for kind, ids in encoded if len(ids) + self._settings.max_tokens <= context]
        if not encoded:
            raise RequestError(f"no prompt fits into a context of {context} tokens with its answer")
        runs = [answer for rule in (PLAIN, *RULES) for answer in self._answers(rule, encoded, progress)]
        plain = [answer for answer in runs if answer.rule == PLAIN]
        prompts_of_plain = [ids for _ in TEMPERATURES for _, ids in encoded]
        return self._divergences(plain, prompts_of_plain, progress), runs

    def _answers(
        self, rule: str, prompts: Sequence[tuple[str, list[int]]], progress: StageProgress
    ) -> Iterator[RuleAnswer]:
        """Yield the engine's answers to all prompts (category, token ids) at all temperatures under one rule."""
        is_plain = rule == PLAIN
        config = EngineConfig(acceptance_rule="coupled" if is_plain else rule)
        core = make_core(self._target, config, None if is_plain else self._speculation)
        cases = [(t, *prompt) for t in TEMPERATURES for prompt in prompts]
        most, seed = self._settings.max_tokens, self._settings.seed
        greedy = SamplingParams(temperature=0, max_tokens=most, seed=seed, ignore_eos=True)
        try:
            decode(core, prompts[0][1], replace(greedy, max_tokens=4), tenant="warm-up")
            shown = staged(cases, progress, lambda case: f"{rule}, temperature {case[0]:g}, {case[1]}")
            for number, (temperature, kind, prompt) in enumerate(shown):
                params = replace(greedy, temperature=temperature)
                run = decode(core, prompt, params, tenant=f"case {number}")
                yield RuleAnswer(rule, temperature, kind, run)
        finally:
            core.close()

    def _divergences(
        self, answers: Sequence[RuleAnswer], prompts: Sequence[list[int]], progress: StageProgress
    ) -> list[KindDivergence]:
        """Compare both models' distributions at the positions of the answers; `prompts` has the prompt of each."""
        by_case: dict[tuple[str, float], list[Divergence]] = defaultdict(list)
        pairs = list(zip(answers, prompts, strict=True))
        stage_name = "distributions, temperature {0[0].temperature:g}, {0[0].kind}"
        for (_, temperature, kind, run), prompt in staged(pairs, progress, stage_name.format):
            text = [*prompt, *run.token_ids]
            rows = slice(len(prompt) - 1, -1)  # the distributions from which the answer's tokens were drawn
            scores = [log_probabilities(model.decoder, text)[rows] for model in (self._target, self._draft)]
            width = min(logits.shape[-1] for logits in scores)  # ids beyond it are padding
            target, draft = (logits[:, :width].float().cpu() for logits in scores)
            by_case[kind, temperature].append(divergence(target, draft, temperature))
        return [KindDivergence(kind, t, combined(parts)) for (kind, t), parts in by_case.items()]


def merged(answers: Sequence[RuleAnswer], *, by_kind: bool) -> list[RuleAnswer]:
    """Return the sum of the answers of each rule and temperature, and with `by_kind` of each category."""
    groups: dict[tuple[str, float, str], list[DecodeRun]] = defaultdict(list)
    for answer in answers:
        groups[answer.rule, answer.temperature, answer.kind if by_kind else "all"].append(answer.run)
    return [RuleAnswer(*key, DecodeRun.total(runs)) for key, runs in groups.items()]


def expectations(answers: Sequence[RuleAnswer], draft_tokens: int) -> list[Expectation]:
    """Return the expected gain for every rule, temperature and number of draft tokens up to `draft_tokens`.

    A pass over fewer tokens than measured has an interpolated time.
    """
    totals = merged(answers, by_kind=False)
    plain = {total.temperature: total.run for total in totals if total.rule == PLAIN}
    gains = []
    for rule, temperature, _, run in totals:
        drafts = run.drafted_per_position
        if rule == PLAIN or not drafts:
            continue
        plain_pass = _pass_seconds(plain[temperature])
        level_cost = run.draft_seconds / sum(drafts) / plain_pass
        curve = RelativeStepCurve(((1, 1.0), (draft_tokens + 1, _pass_seconds(run) / plain_pass)))
        for k in range(1, len(drafts) + 1):
            tokens = 1 + sum(run.per_position[:k])
            cost = pass_cost(k, DraftingCost(level_cost), curve)
            gains.append(Expectation(rule, temperature, k, tokens, cost, tokens / cost))
    return gains


def _pass_seconds(run: DecodeRun) -> float:
    return (run.verify_seconds + run.accept_seconds) / run.passes
