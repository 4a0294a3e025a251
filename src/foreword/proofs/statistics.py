"""Tests the joint distribution of the tokens that the engine's step commits, on a tiny decoder.

The test's threshold allows 0.1% false alarms. Its power is measured on samples of a biased distribution.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from foreword.acceptance.noise import Keys, gumbel, key_tensor
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.reference import probabilities
from foreword.acceptance.request import TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Drawn, Floats
from foreword.backends.interface import Decoder
from foreword.backends.runner import ModelRunner
from foreword.control.fixed import FixedPolicy
from foreword.kv.paged_cache import PAGE_SIZE, PagedCache
from foreword.proofs.passes import lone_request, prompt_pass, tiny_decoder
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Drafter, DraftRequest, DraftTask
from foreword.speculation.requests import PassEntry
from foreword.speculation.step import Stepper


class DrawingDrafter(Drafter):
    """A drafter with a fixed q after each token, unrelated to the target; siblings are distinct."""

    def __init__(self, vocab_size: int, shape: int | Sequence[int]) -> None:
        """Create a drafter of chains of this length, or of trees whose nodes have these parents."""
        parents = range(-1, shape - 1) if isinstance(shape, int) else shape
        rng = np.random.default_rng(vocab_size)
        self._distributions = rng.dirichlet(np.ones(vocab_size) * 2, vocab_size)
        self._ids = torch.arange(vocab_size)
        self._shape = Draft((0,) * len(parents), tuple(parents))

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        shapes = [self._shape.within(task.max_nodes, task.max_depth) for task in tasks]
        ends = np.cumsum([len(shape) for shape in shapes])
        noise = np.split(self._noise([task.request for task in tasks], shapes), ends[:-1])
        return list(map(self._draw, tasks, shapes, noise))

    def _draw(self, task: DraftTask, shape: Draft, noise: Floats) -> Draft:
        tokens: list[int] = []
        drawn: list[Drawn] = []
        for parent, of_node in zip(shape.parents, noise, strict=True):
            newest = task.request.tokens[-1] if parent == ROOT else tokens[parent]
            taken = [tokens[node] for node in range(len(tokens)) if shape.parents[node] == parent]
            distribution = self._distributions[newest].copy()
            distribution[taken] = 0.0
            support = np.flatnonzero(distribution)
            tokens.append(int(support[np.argmax(np.log(distribution[support]) + of_node[support])]))
            drawn.append(Drawn(support, distribution[support] / distribution.sum()))
        return Draft(tuple(tokens), shape.parents, len(task.request.tokens), task.request.epoch, tuple(drawn))

    def _noise(self, requests: Sequence[DraftRequest], shapes: Sequence[Draft]) -> Floats:
        """Return the noise [nodes of all drafts, vocab], which is equal for all siblings."""
        keys = key_tensor(np.concatenate(list(map(_keys, requests, shapes))))
        noise: Floats = gumbel(
            keys[:, None].expand(len(keys), len(self._ids)), self._ids.expand(len(keys), -1)
        ).numpy()
        return noise


def _keys(request: DraftRequest, shape: Draft) -> Keys:
    """Return the noise keys of a draft's nodes, which depend on the position and on the parent."""
    depths = (*shape.depths(), 0)  # the last is the root's, whose index is -1
    levels = [depths[parent] for parent in shape.parents]
    # A node's branch: how many nodes before its parent have the same depth as the parent.
    branches = [depths[: max(parent, 0)].count(depths[parent]) for parent in shape.parents]
    positions = np.array(levels, np.int64) + len(request.tokens)
    return request.sampling.keys(positions, np.array(branches, np.int64))


VOCAB, POSITIONS, CHAIN = 3, 3, 2  # vocabulary, tokens per answer, and draft tokens of a chain
TREE = (-1, -1, 0, 1, 0)  # parents: two siblings, the first with two children, the second with one
PROMPT = (1, 2)
PARAMS = SamplingParams(temperature=1.3, max_tokens=POSITIONS)
FALSE_ALARMS = 0.001  # fraction of unbiased runs above the threshold
BATCH = 256  # requests at once
MODEL_SEED = 5


@dataclass(frozen=True)
class Power:
    """Detection power of a test."""

    threshold: float  # maximum chi-square statistic
    runs: int  # number of biased runs
    caught: float  # fraction of biased runs above the threshold
    false_alarms: float  # fraction of unbiased runs above the threshold


def texts() -> list[tuple[int, ...]]:
    """Return every text of the tested length."""
    return list(product(range(VOCAB), repeat=POSITIONS))


def true_distribution(decoder: Decoder) -> Floats:
    """Return the decoder's joint distribution [texts], from plain passes and the slow reference."""
    limits = TokenLimits(VOCAB)
    next_token: dict[tuple[int, ...], list[float]] = {}  # its distribution by generated text
    for length in range(POSITIONS):
        for generated in product(range(VOCAB), repeat=length):
            with prompt_pass(decoder, [*PROMPT, *generated]) as (runner, batch):
                logits: list[float] = runner.forward(batch).logits[0].tolist()
            next_token[generated] = probabilities(logits, PARAMS, limits, PROMPT, generated)
    return np.array([np.prod([next_token[text[:i]][text[i]] for i in range(POSITIONS)]) for text in texts()])


def sampled_counts(
    decoder: Decoder, rule: Rule, samples: int, seed: int, progress: Callable[[int, int], None] | None = None
) -> Floats:
    """Return the counts [texts] of each text, sampled by the engine's step with drafts."""
    cache = PagedCache(BATCH)
    runner = ModelRunner.allocate(decoder, BATCH, PAGE_SIZE)
    drafter = DrawingDrafter(VOCAB, TREE if rule is Rule.TRAVERSAL else CHAIN)
    policy = FixedPolicy(drafter, len(TREE), CHAIN)
    stepper = Stepper(runner, cache, policy)
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, samples, BATCH):
        seeds = range(seed + start, seed + min(start + BATCH, samples))
        requests = [lone_request(cache, PROMPT, VOCAB, PARAMS, seed=number, rule=rule) for number in seeds]
        while live := [request for request in requests if request.finish_reason is None]:
            stepper.step([PassEntry.of(r, len(r.tokens) - r.kv.computed) for r in live])
        for request in requests:
            counts[tuple(request.output_ids)] += 1
            cache.close(request.kv)
        if progress is not None:
            progress(min(start + BATCH, samples), samples)
    return np.array([counts[text] for text in texts()], np.float64)


def chi_square(counts: Floats, distribution: Floats) -> Floats:
    """Return the chi-square statistic of counts [texts], or of each row of counts [runs, texts]."""
    expected = distribution * counts.sum(axis=-1, keepdims=True)
    return np.asarray(((counts - expected) ** 2 / expected).sum(axis=-1))


def biased_distribution(distribution: Floats, bias: float) -> Floats:
    """Return the distribution biased by this total variation towards the text of median probability."""
    text = int(np.argsort(distribution)[len(distribution) // 2])
    share = bias / (1 - distribution[text])
    biased: Floats = distribution * (1 - share)
    biased[text] += share
    return biased


def measure_power(distribution: Floats, samples: int, bias: float, runs: int, seed: int) -> Power:
    """Determine the threshold from unbiased runs, then the detected fraction of biased runs of `samples` samples."""
    rng = np.random.default_rng(seed)

    def statistics(sampled: Floats, count: int) -> Floats:
        return chi_square(rng.multinomial(samples, sampled, count).astype(np.float64), distribution)

    clean = np.sort(statistics(distribution, 20_000))
    threshold = float(clean[int(len(clean) * (1 - FALSE_ALARMS))])
    fresh = statistics(distribution, 20_000)
    biased = statistics(biased_distribution(distribution, bias), runs)
    alarms = float((fresh > threshold).mean())
    return Power(threshold, runs, float((biased > threshold).mean()), alarms)


def default_decoder() -> Decoder:
    """Return the decoder of the proof."""
    return tiny_decoder(VOCAB, MODEL_SEED)
