"""Tests that *coupled* gives the tokens of plain sampling, and that its noise is random."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement
from foreword.acceptance.judge import judge
from foreword.acceptance.noise import Keys, Stream, bits, extend_keys, gumbel, key_tensor, stems
from foreword.acceptance.rules.trees import DraftTrees, Floats
from foreword.proofs.cases import Case, PossibleTree, random_case, target_logits

LENGTH = 6  # number of compared tokens per case
BATCH = 128


def step_batch(
    cases: Sequence[Case], texts: Sequence[Sequence[int]], drafts: Sequence[PossibleTree]
) -> list[list[int]]:
    """Run one batched step; return the tokens that each request commits after its text, which includes the prompt."""
    samplers = [case.sampler() for case in cases]
    for sampler, case, text in zip(samplers, cases, texts, strict=True):
        sampler.commit(text[len(case.prompt) :])
    histories = [
        [[*text, *tree.path(node)] for node in range(-1, len(tree.tokens))]
        for text, tree in zip(texts, drafts, strict=True)
    ]
    logits = target_logits(cases, histories)
    trees = DraftTrees.stack([tree.tokens for tree in drafts], [tree.parents for tree in drafts])
    verdicts = judge(Judgement.of(logits, trees, samplers))
    committed = []
    for i in range(len(cases)):
        if (error := verdicts.error(i)) is not None:
            raise AssertionError(f"case {i} failed: {error}")
        committed.append(verdicts.tokens(trees, i))
    return committed


def plain_texts(cases: Sequence[Case], length: int) -> list[list[int]]:
    """Return each case's text, prompt included, sampled without drafts."""
    texts = [list(case.prompt) for case in cases]
    for _ in range(length):
        for text, new in zip(texts, step_batch(cases, texts, [PossibleTree()] * len(cases)), strict=True):
            text.extend(new)
    return texts


def likely_tree(rng: np.random.Generator, vocab: int, truth: Sequence[int]) -> PossibleTree:
    """Return a random tree with many nodes on the text of plain sampling, so that all acceptance depths occur."""
    tree = PossibleTree()
    for node in range(int(rng.integers(0, 12))):
        parent = int(rng.integers(max(-1, node - 3), node))
        path = tree.path(parent)
        is_on_text = path == tuple(truth[: len(path)]) and len(path) < len(truth)
        token = truth[len(path)] if is_on_text and rng.random() < 0.6 else int(rng.integers(vocab))
        tree = tree.grown(token, parent, None, 1.0)
    return tree


def pathwise_mismatches(count: int, seed: int) -> tuple[int, int, int]:
    """Return (cases tried, accepted draft tokens, cases whose text differs from plain sampling)."""
    rng = np.random.default_rng(seed)
    accepted = wrong = 0
    for start in range(0, count, BATCH):
        cases = [random_case(rng) for _ in range(min(BATCH, count - start))]
        plain = plain_texts(cases, LENGTH)
        texts = [list(case.prompt) for case in cases]
        truths = [text[len(case.prompt) :] for case, text in zip(cases, plain, strict=True)]
        drafts = [likely_tree(rng, c.limits.vocab_size, t) for c, t in zip(cases, truths, strict=True)]
        for truth, tokens in zip(truths, step_batch(cases, texts, drafts), strict=True):
            accepted += len(tokens) - 1
            wrong += tokens[: len(truth)] != truth[: len(tokens)]
    return count, accepted, wrong


CELLS = 16  # cells of each number in tests of pairs
TAIL_BITS = 12  # a tail has a weight of 2**-TAIL_BITS
ROWS, TOKENS = 64, 16_384  # numbers of positions and token ids of the tested noise
IDS = torch.arange(TOKENS).expand(ROWS, TOKENS)


@dataclass(frozen=True)
class NoiseCheck:
    """A property of the noise, with its deviation in standard deviations."""

    name: str
    draws: int
    deviation: float


def keys_of(seed: int = 1, sample: int = 0, stream: Stream = Stream.TARGET, nonce: int = 0) -> Tensor:
    """Return keys [ROWS, TOKENS] of consecutive positions."""
    keys: Keys = extend_keys(stems(seed, sample, stream, nonce), np.arange(ROWS))
    return key_tensor(keys)[:, None].expand_as(IDS)


def words(keys: Tensor) -> np.ndarray:
    """Return the raw bits of the noise as uint64 [ROWS, TOKENS]."""
    return bits(keys, IDS).numpy().view(np.uint64)


def noise_checks() -> list[NoiseCheck]:
    """Check all properties on fixed keys, reproducibly."""
    here = words(keys_of())
    neighbours = {
        "tokens": (here[:, :-1], here[:, 1:]),
        "positions": (here[:-1], here[1:]),
        "seeds": (here, words(keys_of(seed=2))),
        "distant seeds": (here, words(keys_of(seed=1 | 1 << 63))),
        "samples": (here, words(keys_of(sample=1))),
        "streams": (here, words(keys_of(stream=Stream.DRAFT))),
        "nonces": (here, words(keys_of(nonce=1))),
    }
    checks = [
        NoiseCheck(f"independence of neighbouring {name}", a.size, pair_deviation(a, b))
        for name, (a, b) in neighbours.items()
    ]
    return [*checks, bit_balance(here), uniformity(here), ties(here), *tails()]


def pair_deviation(a: np.ndarray, b: np.ndarray) -> float:
    """Return the chi-square of the joint high bits of two aligned arrays, as a normal deviate."""
    shift = np.uint64(60)  # keeps the highest 4 bits, which number the CELLS
    cell = (a >> shift) * np.uint64(CELLS) + (b >> shift)
    return standardised(np.bincount(cell.ravel().astype(np.int64), minlength=CELLS**2))


def standardised(counts: np.ndarray) -> float:
    """Return how uneven the counts of equally likely cells are, as a normal deviate."""
    expected = counts.sum() / len(counts)
    chi = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(counts) - 1
    return (chi - freedom) / float(np.sqrt(2 * freedom))


def bit_balance(here: np.ndarray) -> NoiseCheck:
    """Check that each of the 64 bits is set half of the time."""
    shares = [float(((here >> np.uint64(bit)) & np.uint64(1)).mean()) for bit in range(64)]
    worst = max(abs(share - 0.5) for share in shares)
    return NoiseCheck("balance of every bit", here.size, worst * 2 * float(np.sqrt(here.size)))


def uniformity(here: np.ndarray) -> NoiseCheck:
    """Check that the high bits fill 4096 cells evenly."""
    counts = np.bincount((here >> np.uint64(52)).ravel().astype(np.int64), minlength=4096)
    return NoiseCheck("uniformity", here.size, standardised(counts))


def ties(here: np.ndarray) -> NoiseCheck:
    """Check that a million draws have no ties; with 24 bits there would be tens of thousands."""
    # Of 64 bits, the noise uses the highest 54, of which it sets the lowest. A tie counts as 100 standard deviations.
    equal = here.size - len(np.unique((here >> np.uint64(10)) | np.uint64(1)))
    return NoiseCheck("ties", here.size, float(equal) * 100)


def tails() -> list[NoiseCheck]:
    """Check that both tails of the Gumbel distribution are finite and have the right weight."""
    noise: Floats = gumbel(keys_of(), IDS).numpy()
    share = 2.0**-TAIL_BITS
    high, low = -np.log(-np.log1p(-share)), -np.log(-np.log(share))  # quantiles of the Gumbel distribution
    spread = float(np.sqrt(share * noise.size))  # standard deviation of a tail's count
    infinite = float((~np.isfinite(noise)).sum()) * 100
    counts = {"upper tail": (noise > high).sum(), "lower tail": (noise < low).sum()}
    return [
        NoiseCheck(name, noise.size, abs(float(count) - share * noise.size) / spread + infinite)
        for name, count in counts.items()
    ]
