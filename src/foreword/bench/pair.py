"""Measures a target and its draft model: their distributions, and the engine with every acceptance rule."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import Decoder
from foreword.bench.drafters.decode import DecodeRun, decode
from foreword.bench.drafters.summary import summed
from foreword.bench.prompts import BenchPrompt
from foreword.bench.quality import Divergence, combined, divergence, log_probabilities
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
    """The engine with one rule at one temperature, over all texts."""

    rule: str  # or plain
    temperature: float
    kind: str
    tokens: int
    passes: int
    drafts: tuple[int, ...]  # by level
    accepted: tuple[int, ...]  # by level
    draft_seconds: float
    verify_seconds: float
    accept_seconds: float

    @staticmethod
    def of(rule: str, temperature: float, kind: str, runs: Sequence[DecodeRun]) -> "RuleRun":
        return RuleRun(
            rule,
            temperature,
            kind,
            sum(run.tokens for run in runs),
            sum(run.passes for run in runs),
            summed([run.drafted_per_position for run in runs]),
            summed([run.accepted_per_position for run in runs]),
            sum(run.draft_seconds for run in runs),
            sum(run.verify_seconds for run in runs),
            sum(run.accept_seconds for run in runs),
        )

    @property
    def per_position(self) -> list[float]:
        """Return, by position, the fraction of drafts accepted up to it."""
        return [a / d if d else 0.0 for a, d in zip(self.accepted, self.drafts, strict=True)]

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


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
        texts: list[_Text] = []
        for rule in (PLAIN, *RULES):
            for kind, temperature, prompt, run in self._answers(rule, encoded, progress):
                runs.append(RuleAnswer(rule, temperature, kind, run))
                if rule == PLAIN:
                    texts.append(_Text(kind, temperature, [*prompt, *run.token_ids], len(prompt)))
        return self._divergences(texts, progress), runs

    def _answers(
        self, rule: str, prompts: Sequence[tuple[str, list[int]]], progress: StageProgress
    ) -> Iterator[tuple[str, float, list[int], DecodeRun]]:
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
                yield kind, temperature, prompt, decode(core, prompt, params, tenant=f"case {number}")
        finally:
            core.close()

    def _divergences(self, texts: "Sequence[_Text]", progress: StageProgress) -> list[KindDivergence]:
        found: dict[tuple[str, float], list[Divergence]] = defaultdict(list)
        for number, text in enumerate(texts):
            progress(f"laws, temperature {text.temperature:g}, {text.kind}", number, len(texts))
            pair = [_scores(model.decoder, text) for model in (self._target, self._draft)]
            width = min(scores.shape[-1] for scores in pair)  # padding has no tokens
            target, draft = (scores[:, :width] for scores in pair)
            found[text.kind, text.temperature].append(divergence(target, draft, text.temperature))
        return [KindDivergence(kind, t, combined(parts)) for (kind, t), parts in found.items()]


@dataclass(frozen=True)
class _Text:
    kind: str
    temperature: float
    tokens: list[int]
    prompt_len: int


def _scores(decoder: Decoder, text: _Text) -> Tensor:
    """Return the logits at the answer's positions."""
    return log_probabilities(decoder, text.tokens)[text.prompt_len - 1 : -1].float().cpu()


def merged(answers: Sequence[RuleAnswer], *, by_kind: bool) -> list[RuleRun]:
    """Merge answers of the same rule and temperature, and by category if wanted."""
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
