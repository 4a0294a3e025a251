"""Compares next-token distributions: of weight formats with float32, and of a draft model with its target."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import Decoder
from foreword.bench.drafters.decode import DecodeRun, decode, ratio
from foreword.bench.prompts import BenchPrompt
from foreword.bench.skeleton import PLAIN
from foreword.bench.theory import DraftingCost, RelativeStepCurve, pass_cost
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.model.vocabularies import check_same_vocabulary
from foreword.engine.assembly import make_core
from foreword.engine.config import EngineConfig
from foreword.engine.loader import LoadedModel
from foreword.engine.prompts import encode_prompt
from foreword.errors import RequestError
from foreword.progress import StageProgress
from foreword.proofs.passes import prompt_pass

WINDOW = 512
"""Context length into which the text is cut."""


@dataclass(frozen=True)
class Quality:
    """Difference of one weight format from float32."""

    form: str
    tokens: int
    mean_kl: float  # nats, from the distribution of float32
    top1_agreement: float  # fraction of positions with the same most likely token


def read_text(path: Path) -> str:
    """Return the text of a file, or all strings of a .jsonl file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror}; give a text file") from error
    if path.suffix != ".jsonl":
        return text
    return "\n\n".join(_strings(json.loads(line)) for line in text.splitlines() if line.strip())


def _strings(value: object) -> str:
    if isinstance(value, str):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "\n".join(filter(None, map(_strings, parts)))


def measure_quality(
    reference: Decoder,
    forms: Mapping[str, Callable[[], Decoder]],
    tokens: Sequence[int],
    progress: Callable[[int, int], None] | None = None,
) -> list[Quality]:
    """Return KL and agreement of every format, computed over windows of the text."""
    windows = [list(tokens[i : i + WINDOW]) for i in range(0, len(tokens), WINDOW)]
    decoders = {name: load() for name, load in forms.items()}
    sums = {name: [0.0, 0.0] for name in forms}
    for index, window in enumerate(windows):
        expected = log_probabilities(reference, window)
        for name, decoder in decoders.items():
            ours = log_probabilities(decoder, window)
            sums[name][0] += float((expected.exp() * (expected - ours)).sum())
            sums[name][1] += float((expected.argmax(-1) == ours.argmax(-1)).sum())
        if progress is not None:
            progress(index + 1, len(windows))
    count = len(tokens)
    return [Quality(name, count, kl / count, agreed / count) for name, (kl, agreed) in sums.items()]


@torch.inference_mode()
def log_probabilities(decoder: Decoder, tokens: list[int]) -> Tensor:
    """Return the next-token log-probabilities after every token of a text, float32 [tokens, vocab]."""
    with prompt_pass(decoder, tokens) as (runner, batch):
        rows = torch.arange(len(tokens), dtype=torch.int32)
        return runner.forward(replace(batch, logit_rows=rows)).logits.log_softmax(-1)


@dataclass(frozen=True)
class Divergence:
    """Means over positions. p is the target's distribution at a temperature, q that of the draft model."""

    places: int  # number of positions
    tv: float  # total variation, ½ Σ |p − q|
    kl: float | None  # KL(p || q) in nats; None at temperature 0, where it may be infinite
    same_top: float  # fraction of positions with the same most likely token
    token: float  # acceptance by *token*, and of the first token by *block*: 1 − TV
    coupled: float  # acceptance by *coupled*, with shared noise
    chosen: float  # acceptance of the draft model's most likely token


def distributions(logits: Tensor, temperature: float) -> Tensor:
    """Return probabilities, float64 [positions, vocab]; at temperature 0, 1 for the most likely token."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    return (logits.double() / temperature).softmax(-1)


def divergence(target: Tensor, draft: Tensor, temperature: float) -> Divergence:
    """Compare the logits [positions, vocab] of both models on the same texts."""
    p, q = distributions(target, temperature), distributions(draft, temperature)
    tv = (p - q).abs().sum(-1) / 2
    kl = None if temperature == 0 else float((p * (p.log() - q.log())).nansum(-1).clamp(min=0).mean())
    chosen = p.gather(-1, q.argmax(-1, keepdim=True))
    return Divergence(
        places=len(p),
        tv=float(tv.mean()),
        kl=kl,
        same_top=float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        token=float((1 - tv).mean()),
        coupled=float(coupled_agreement(p, q).mean()),
        chosen=float(chosen.mean()),
    )


def coupled_agreement(p: Tensor, q: Tensor) -> Tensor:
    """Return the probability that argmax(log p + G) = argmax(log q + G) for shared Gumbel noise G, [positions].

    Token v wins both with probability 1 / Σ_u max(p_u / p_v, q_u / q_v). The maximum depends on whether p_u / q_u
    exceeds p_v / q_v. Sorted by that ratio, the sum consists of a suffix of p and a prefix of q.
    """
    order = torch.where(q > 0, p / q, torch.inf).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    q_until = q.cumsum(-1)
    p_after = (p.sum(-1, keepdim=True) - p.cumsum(-1)).clamp(min=0)
    both = (p > 0) & (q > 0)
    return torch.where(both, 1 / (p_after / p + q_until / q), 0.0).sum(-1)


def combined(parts: Sequence[Divergence]) -> Divergence:
    """Return the means over all positions of several texts; None stays None."""
    places, *columns = zip(*map(astuple, parts), strict=True)
    whole = sum(places)
    means: list[Any] = [
        None if None in column else sum(map(mul, column, places)) / whole for column in columns
    ]
    return Divergence(whole, *means)


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
    found: Divergence


@dataclass(frozen=True)
class RuleRun:
    """The engine with one acceptance rule at one temperature, summed over answers."""

    rule: str  # acceptance rule, or plain
    temperature: float
    kind: str
    tokens: int
    passes: int
    drafts: tuple[int, ...]  # drafts with a token at this position
    accepted: tuple[int, ...]  # drafts accepted up to this position
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float

    @staticmethod
    def of(rule: str, temperature: float, kind: str, runs: Sequence[DecodeRun]) -> "RuleRun":
        run = DecodeRun.total(runs)
        counts = run.tokens, run.passes, run.drafted_per_position, run.accepted_per_position
        times = run.draft_seconds, run.verify_seconds, run.accept_seconds
        return RuleRun(rule, temperature, kind, *counts, *times)

    @property
    def per_position(self) -> list[float]:
        """Fraction of drafts accepted up to each position."""
        return list(map(ratio, self.accepted, self.drafts))

    @property
    def tokens_per_pass(self) -> float:
        return ratio(self.tokens, self.passes)


class RuleAnswer(NamedTuple):
    """One answer of the engine."""

    rule: str
    temperature: float
    kind: str
    run: DecodeRun


@dataclass(frozen=True)
class Expectation:
    """Expected gain of drafts of k tokens, from measured acceptance and times."""

    rule: str
    temperature: float
    k: int
    tokens_per_pass: float
    cost: float  # of a draft and its pass, in plain passes
    speedup: float


class PairBench:
    """Two loaded models with the same vocabulary."""

    def __init__(
        self, target: LoadedModel, draft: LoadedModel, draft_name: str, settings: PairSettings
    ) -> None:
        check_same_vocabulary(target.checkpoint, draft.checkpoint)
        self._target, self._draft = target, draft
        self._room = min(model.decoder.config.context_length for model in (target, draft))
        self._speculation = SpeculationConfig.parse(
            {
                "method": "draft_model",
                "model": draft_name,
                "num_speculative_tokens": settings.guesses,
                "fixed": True,
            }
        )
        self._settings = settings

    def run(
        self, prompts: Sequence[BenchPrompt], progress: StageProgress
    ) -> tuple[list[KindDivergence], list[RuleAnswer]]:
        """Measure every temperature, category and rule."""
        tokenizer, room = self._target.tokenizer, self._room
        encoded = [(prompt.category, encode_prompt(tokenizer, prompt.text)) for prompt in prompts]
        encoded = [one for one in encoded if len(one[1]) + self._settings.max_tokens <= room]
        if not encoded:
            raise RequestError(f"no prompt fits into a context of {room} tokens with its answer")
        runs: list[RuleAnswer] = []
        prompts_of_plain: list[list[int]] = []
        for rule in (PLAIN, *RULES):
            for answer, prompt in self._answers(rule, encoded, progress):
                runs.append(answer)
                if rule == PLAIN:
                    prompts_of_plain.append(prompt)
        return self._divergences(runs, prompts_of_plain, progress), runs

    def _answers(
        self, rule: str, prompts: Sequence[tuple[str, list[int]]], progress: StageProgress
    ) -> Iterator[tuple[RuleAnswer, list[int]]]:
        is_plain = rule == PLAIN
        config = EngineConfig(acceptance_rule="coupled" if is_plain else rule)
        core = make_core(self._target, config, None if is_plain else self._speculation.as_mapping())
        cases = [(t, *prompt) for t in TEMPERATURES for prompt in prompts]
        settings = self._settings
        try:
            decode(core, prompts[0][1], SamplingParams(temperature=0, max_tokens=4), tenant="warm-up")
            for number, (temperature, kind, prompt) in enumerate(cases):
                progress(f"{rule}, temperature {temperature:g}, {kind}", number, len(cases))
                params = SamplingParams(
                    temperature=temperature,
                    max_tokens=settings.max_tokens,
                    seed=settings.seed,
                    ignore_eos=True,
                )
                run = decode(core, prompt, params, tenant=f"case {number}")
                yield RuleAnswer(rule, temperature, kind, run), prompt
        finally:
            core.close()

    def _divergences(
        self, answers: Sequence[RuleAnswer], prompts: Sequence[list[int]], progress: StageProgress
    ) -> list[KindDivergence]:
        """Compare both models' distributions at the positions of the first answers, one for each prompt."""
        found: dict[tuple[str, float], list[Divergence]] = defaultdict(list)
        for number, (answer, prompt) in enumerate(zip(answers, prompts, strict=False)):
            temperature, kind = answer.temperature, answer.kind
            progress(f"distributions, temperature {temperature:g}, {kind}", number, len(prompts))
            scores = [
                log_probabilities(model.decoder, [*prompt, *answer.run.token_ids])[len(prompt) - 1 : -1]
                for model in (self._target, self._draft)
            ]
            width = min(one.shape[-1] for one in scores)  # ids beyond it are padding
            target, draft = (one[:, :width].float().cpu() for one in scores)
            found[kind, temperature].append(divergence(target, draft, temperature))
        return [KindDivergence(kind, t, combined(parts)) for (kind, t), parts in found.items()]


def merged(answers: Sequence[RuleAnswer], *, by_kind: bool) -> list[RuleRun]:
    """Merge the answers of each rule and temperature, and with `by_kind` of each category."""
    groups: dict[tuple[str, float, str], list[DecodeRun]] = defaultdict(list)
    for one in answers:
        groups[one.rule, one.temperature, one.kind if by_kind else "all"].append(one.run)
    return [RuleRun.of(*key, runs) for key, runs in groups.items()]


def expectations(answers: Sequence[RuleAnswer], guesses: int) -> list[Expectation]:
    """Return the expected gain for every rule, temperature and number of draft tokens."""
    together = merged(answers, by_kind=False)
    plain = {run.temperature: run for run in together if run.rule == PLAIN}
    found = []
    for run in together:
        if run.rule == PLAIN or not run.drafts:
            continue
        alone = plain[run.temperature]
        plain_pass = (alone.verify_seconds + alone.accept_seconds) / alone.passes
        per_token = run.draft_seconds / sum(run.drafts) / plain_pass
        ratio = (run.verify_seconds + run.accept_seconds) / run.passes / plain_pass
        curve = RelativeStepCurve(((1, 1.0), (guesses + 1, ratio)))
        for k in range(1, len(run.drafts) + 1):
            tokens = 1 + sum(run.per_position[:k])
            cost = pass_cost(k, DraftingCost(per_token), curve)
            found.append(Expectation(run.rule, run.temperature, k, tokens, cost, tokens / cost))
    return found
