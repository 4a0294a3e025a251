"""*Coupled*: the same tokens as plain sampling, exactly, for random targets, trees, parameters and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreword.acceptance.batch import Judgement
from foreword.acceptance.judge import judge
from foreword.acceptance.rules.trees import DraftTrees
from foreword.proofs.cases import Case, random_case, target_logits

LENGTH = 6
"""Tokens of plain text that each case is compared on."""

BATCH = 128


@dataclass(frozen=True)
class Tree:
    """A draft: tokens and parents, as in `Draft`."""

    tokens: list[int]
    parents: list[int]

    def path(self, node: int) -> list[int]:
        """The tokens from the first level down to a node."""
        tokens: list[int] = []
        while node != -1:
            tokens.insert(0, self.tokens[node])
            node = self.parents[node]
        return tokens


EMPTY = Tree([], [])


def step_batch(
    cases: Sequence[Case], texts: Sequence[Sequence[int]], drafts: Sequence[Tree]
) -> list[list[int]]:
    """One batched step: the tokens that each request commits after its text (prompt included)."""
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
    """Each case's text, prompt included, one token at a time without any draft."""
    texts = [list(case.prompt) for case in cases]
    for _ in range(length):
        for text, new in zip(texts, step_batch(cases, texts, [EMPTY] * len(cases)), strict=True):
            text.extend(new)
    return texts


def likely_tree(rng: np.random.Generator, vocab: int, truth: Sequence[int]) -> Tree:
    """A random tree in which many nodes continue the true text, so that verdicts of all depths occur."""
    tree = Tree([], [])
    for node in range(int(rng.integers(0, 12))):
        parent = int(rng.integers(max(-1, node - 3), node))
        path = tree.path(parent)
        true_next = truth[len(path)] if path == list(truth[: len(path)]) and len(path) < len(truth) else -1
        guess = true_next if true_next >= 0 and rng.random() < 0.6 else int(rng.integers(vocab))
        tree.tokens.append(guess)
        tree.parents.append(parent)
    return tree


def pathwise_mismatches(count: int, seed: int) -> tuple[int, int, int]:
    """(cases tried, draft tokens accepted in them, cases whose text differs from plain sampling)."""
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
