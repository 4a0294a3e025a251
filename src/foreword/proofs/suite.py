"""The suites of `foreword prove`, each a function that yields rows of the report."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from operator import sub
from statistics import fmean

import numpy as np
import torch

from foreword.acceptance.noise import Stream, extend_keys, gumbel, key_tensor, stems
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Floats
from foreword.progress import StageProgress
from foreword.proofs import enumeration, statistics
from foreword.proofs.cases import Case, DraftKind, SmallDrafter
from foreword.proofs.coupled import noise_checks, pathwise_mismatches
from foreword.proofs.enumeration import Distribution, TreeDrafting
from foreword.structured.params import StructuredOutputs


@dataclass(frozen=True)
class ProofRow:
    """Result for a rule in one kind of case."""

    rule: str  # a rule, or "noise"
    case: str  # what was compared
    tried: int  # number of cases or samples
    deviation: float  # largest deviation
    limit: float  # maximum deviation
    passed: bool
    power: float | None = None  # detected fraction of planted faults, of statistical tests
    note: str = ""


def bounded(rule: str, case: str, tried: int, deviation: float, limit: float) -> ProofRow:
    """Return a row that passes if its deviation is within the limit."""
    return ProofRow(rule, case, tried, deviation, limit, bool(deviation <= limit))


@dataclass(frozen=True)
class Agreement:
    """How often samples from two distributions are equal if they share their noise."""

    distance: float  # total variation
    agreed: float  # fraction of draws
    error: float  # its standard error

    @property
    def bound(self) -> float:
        """Lower bound for shared Gumbel noise."""
        return (1 - self.distance) / (1 + self.distance)


def expected_accepted(case: Case, draft: SmallDrafter, length: int) -> float:
    """Return the expected accepted draft tokens of one step, by enumeration."""
    distribution = enumeration.step_distribution(case, draft, case.prompt, length)
    return sum((len(tokens) - 1) * chance for tokens, chance in distribution.items())


def coupled_agreement(p: Floats, q: Floats, draws: int, seed: int) -> Agreement:
    """Sample from p and q with the same noise, as *coupled* does at one position."""
    keys = key_tensor(extend_keys(stems(seed, 0, Stream.TARGET, 0), np.arange(draws)))
    ids = torch.arange(len(p)).expand(draws, len(p))
    noise = gumbel(keys[:, None].expand_as(ids), ids).numpy()
    with np.errstate(divide="ignore"):
        same = np.argmax(np.log(p) + noise, axis=1) == np.argmax(np.log(q) + noise, axis=1)
    distance = float(np.abs(p - q).sum() / 2)
    agreed = float(same.mean())
    return Agreement(distance, agreed, float(np.sqrt(agreed * (1 - agreed) / draws)))


EXACT = 1e-9  # maximum deviation of an enumerated probability: rounding
NOISE_LIMIT = 4.5  # standard deviations that chance exceeds once in 100,000 checks
CHAIN_RULES = (Rule.TOKEN, Rule.BLOCK)

TREES = {  # parents of the nodes
    "two siblings": (-1, -1),
    "three siblings": (-1, -1, -1),
    "siblings below the first": (-1, -1, 0, 0),
    "two chains": (-1, -1, 0, 1),
}

PARAMETERS = {
    "temperature 1": SamplingParams(),
    "temperature 0": SamplingParams(temperature=0),
    "top_p 0.8": SamplingParams(temperature=0.8, top_p=0.8),
    "top_k 2": SamplingParams(top_k=2),
    "min_p 0.3": SamplingParams(temperature=1.5, min_p=0.3),
    "penalties": SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.4),
    "logit_bias": SamplingParams(logit_bias={0: 1.5, 2: -1.0}),
    "bad_words, min_tokens": SamplingParams(min_tokens=2),
    "allowed tokens": SamplingParams(allowed_token_ids=(0, 2)),
    "grammar": SamplingParams(structured=StructuredOutputs(regex="(ab|b)*a?b?")),
}


@dataclass(frozen=True)
class ProofSize:
    """Size of the suites."""

    chains: tuple[int, ...]  # draft lengths to enumerate
    trees: tuple[str, ...]  # names of TREES to enumerate
    targets: int  # targets per shape, drafter and parameter
    pathwise: int  # random cases of the coupled rule
    samples: int  # sampled requests per rule
    bias: float  # total variation to detect with 95% power

    @property
    def name(self) -> str:
        """Public name of the size."""
        return "full" if self == FULL else "quick"


QUICK = ProofSize(chains=(1, 2), trees=("two siblings",), targets=1, pathwise=2_000, samples=3_000, bias=0.03)
FULL = ProofSize(
    chains=(1, 2, 3, 4), trees=tuple(TREES), targets=3, pathwise=20_000, samples=60_000, bias=0.005
)


def run_suites(size: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Yield all rows of the report."""
    for suite in (enumerated, enumerated_trees, like_block, pathwise, noise, acceptance, sampled):
        yield from suite(size, progress)


def small_case(rule: Rule, params: SamplingParams, target: int) -> Case:
    """Return a request over three tokens, one of which may end it, with one bad word."""
    words = ((1, 2), (2, 2, 0)) if params.min_tokens else ()
    return Case(params, TokenLimits(3, (0,), words), (1, 2), 0, 1000 + target, rule=rule, spread=1.0)


def _worst(
    size: ProofSize, rule: Rule, distributions_of: Callable[[Case], list[Distribution]]
) -> tuple[int, float]:
    """Return the number of compared distributions, and their largest deviation from the target's.

    `distributions_of` returns the distributions to compare for a case; cases are all parameters and targets.
    """
    worst, tried = 0.0, 0
    for params, target in product(PARAMETERS.values(), range(size.targets)):
        case = small_case(rule, params, target)
        expected = enumeration.target_distribution(case)
        deviations = [
            enumeration.worst_deviation(distribution, expected) for distribution in distributions_of(case)
        ]
        worst, tried = max(worst, *deviations), tried + len(deviations)
    return tried, worst


def enumerated(size: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Compare the joint distribution of three positions with *token* and *block*, to 1e-9."""

    def distributions_of(kind: DraftKind, case: Case) -> list[Distribution]:
        model = SmallDrafter(case, kind)
        return [enumeration.text_distribution(case, model, length) for length in size.chains]

    for rule, (done, kind) in product(CHAIN_RULES, enumerate(DraftKind, 1)):
        tried, worst = _worst(size, rule, partial(distributions_of, kind))
        progress(f"enumerating {rule.name.lower()}", done, len(DraftKind))
        yield bounded(
            rule.name.lower(), f"joint distribution by enumeration, {kind.value}", tried, worst, EXACT
        )


def enumerated_trees(size: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Compare the joint distribution of three positions with *traversal*, for siblings with and without replacement."""

    def distributions_of(kind: DraftKind, replaced: bool, case: Case) -> list[Distribution]:
        model = SmallDrafter(case, kind)
        shapes = [TreeDrafting(model, TREES[shape], replaced) for shape in size.trees]
        return list(map(enumeration.tree_text_distribution, shapes))

    for done, (kind, replaced) in enumerate(product(DraftKind, (False, True)), 1):
        tried, worst = _worst(size, Rule.TRAVERSAL, partial(distributions_of, kind, replaced))
        progress("enumerating traversal", done, 2 * len(DraftKind))
        how = f"trees {'with' if replaced else 'without'} replacement"
        yield bounded(
            "traversal", f"joint distribution by enumeration, {how}, {kind.value}", tried, worst, EXACT
        )


def like_block(size: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Compare *traversal* with *block* on chains."""
    deviations = []
    for (target, kind), length in product(enumerate(DraftKind), size.chains):
        case = small_case(Rule.BLOCK, SamplingParams(), target)
        model = SmallDrafter(case, kind)
        expected = enumeration.step_distribution(case, model, case.prompt, length)
        chains = TreeDrafting(model, tuple(range(-1, length - 1)))
        distribution = enumeration.tree_step_distribution(chains, case.prompt)
        deviations.append(enumeration.worst_deviation(distribution, expected))
    progress("traversal and block", 1, 1)
    compared = "accepts and draws as block does on a chain"
    yield bounded("traversal", compared, len(deviations), max(deviations), EXACT)


def pathwise(size: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Compare texts with *coupled* and texts of plain sampling, which must be equal."""
    parts, accepted, wrong = 10, 0, 0
    for part in range(parts):
        _, accepted_in_part, wrong_in_part = pathwise_mismatches(size.pathwise // parts, seed=part)
        accepted, wrong = accepted + accepted_in_part, wrong + wrong_in_part
        progress("coupled against plain sampling", part + 1, parts)
    case = f"same text as plain sampling, trees ({accepted} draft tokens accepted)"
    yield bounded("coupled", case, size.pathwise, wrong, 0)


def noise(_: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Test the randomness of the noise that *coupled* shares between draft and target."""
    progress("noise", 0, 1)
    for check in noise_checks():
        yield bounded("noise", check.name, check.draws, abs(check.deviation), NOISE_LIMIT)


def acceptance(size: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Check acceptance: at one position *token* 1 - TV, *coupled* its bound; on chains *block* as much as *token*."""
    progress("acceptance", 0, 1)
    tried = 12 * size.targets
    by_token, by_block = [], []  # expected accepted tokens of a chain of 3, by target
    matches: list[float] = []  # deviations of *token* from 1 - TV
    agreements: list[Agreement] = []
    for target in range(tried):
        block_case = small_case(Rule.BLOCK, SamplingParams(), target)
        case = small_case(Rule.TOKEN, SamplingParams(), target)
        draft = SmallDrafter(case, DraftKind.DRAWN, 0.3)
        by_token.append(expected_accepted(case, draft, 3))
        by_block.append(expected_accepted(block_case, SmallDrafter(block_case, DraftKind.DRAWN, 0.3), 3))
        first_token = enumeration.target_distribution(case, 1)
        p = np.array([first_token.get((token,), 0.0) for token in range(case.limits.vocab_size)])
        agreement = coupled_agreement(p, draft.probabilities(case.prompt), 20_000, target)
        matches.append(abs(expected_accepted(case, draft, 1) - (1 - agreement.distance)))
        agreements.append(agreement)
    mean_match = fmean(1 - one.distance for one in agreements)
    yield bounded(
        "token", f"accepts 1 - TV at a position (mean {mean_match:.3f})", tried, max(matches), EXACT
    )
    gap = max(map(sub, by_token, by_block))
    means = f"{fmean(by_block):.3f} against {fmean(by_token):.3f}"
    yield bounded(
        "block", f"accepts no less than token on chains of 3 ({means})", tried, max(gap, 0.0), EXACT
    )
    shortfall = max((one.bound - one.agreed) / one.error for one in agreements)  # in standard errors
    mean_agreed = fmean(one.agreed for one in agreements)
    claim = f"accepts (1 - TV) / (1 + TV) or more (mean {mean_agreed:.3f}), deviates by"
    yield bounded("coupled", claim, tried, max(shortfall, 0.0), NOISE_LIMIT)


def sampled(size: ProofSize, progress: StageProgress) -> Iterator[ProofRow]:
    """Sample with all rules through the engine's step on a tiny decoder, and measure the test's power."""
    decoder = statistics.default_decoder()
    distribution = statistics.true_distribution(decoder)
    power = statistics.measure_power(distribution, size.samples, size.bias, runs=1000, seed=1)
    for rule in Rule:
        name = rule.name.lower()
        title = f"sampling {name} through the step"
        counts = statistics.sampled_counts(decoder, rule, size.samples, 0, partial(progress, title))
        statistic = float(statistics.chi_square(counts, distribution))
        fits = statistic <= power.threshold and power.caught >= 0.95 and power.false_alarms <= 0.002
        case = f"chi-square of 3 positions through the step; catches a bias of {size.bias:.1%}"
        note = f"{power.runs} biased runs, false alarms {power.false_alarms:.2%}"
        yield ProofRow(name, case, size.samples, statistic, power.threshold, fits, power.caught, note)
