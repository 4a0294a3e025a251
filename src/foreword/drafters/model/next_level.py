"""Which tokens a draft model puts after the newest nodes of its trees."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.draw import draw, kept_tokens
from foreword.acceptance.noise import gumbel, key_tensor
from foreword.acceptance.pipeline.distribution import Distributions, RowShape, shape_rows
from foreword.acceptance.rules.drawn import Drawn
from foreword.acceptance.rules.rule import Rule
from foreword.drafters.model.guessed_tree import GrowingTree
from foreword.drafters.model.tree_shape import fixed_shape

_RANKED = 64
"""Likeliest tokens among which siblings are ranked; noise is drawn for these alone."""


def grow_chains(trees: Sequence[GrowingTree], logits: Tensor) -> None:
    """One token after each tree's newest node, drawn with the request's parameters and its rule's noise.

    logits [trees, vocab]. *token* and *block* need to know what it was drawn from; *coupled* does not.
    """
    logits = with_fixed_corrections(trees, logits)
    shaped = shape_rows(logits, row_shape(trees, logits))
    keys = np.concatenate([tree.keys() for tree in trees])
    tokens = draw(shaped, keys).tolist()
    only = shaped.only.tolist()
    rules = [tree.request.sampling.rule for tree in trees]
    telling = [row for row, rule in enumerate(rules) if rule is not Rule.COUPLED and only[row] < 0]
    drawn = _drawn_from(shaped, telling)
    for row, (tree, token) in enumerate(zip(trees, tokens, strict=True)):
        if token < 0:  # the model has no distribution here
            tree.frontier = []
        else:
            tree.grow([(0.0, tree.frontier[0], token, drawn.get(row))])


def _drawn_from(shaped: Distributions, rows: list[int]) -> dict[int, Drawn]:
    """What each of these rows draws from; nothing for a row that has no distribution."""
    kept = kept_tokens(shaped, torch.tensor(rows, dtype=torch.int64, device=shaped.logits.device))
    weights = kept.log_weights.exp().cpu().numpy()
    of_row, ids = kept.rows.cpu().numpy(), kept.ids.cpu().numpy()
    starts = np.flatnonzero(np.diff(of_row, prepend=-1))
    return {
        int(of_row[start]): Drawn(ids[start:end], weights[start:end] / weights[start:end].sum())
        for start, end in pairwise([*starts, len(of_row)])
    }


def grow_trees(trees: Sequence[GrowingTree], logits: Tensor, width: int) -> None:
    """`width` nodes after each tree's newest level; logits [all frontier nodes, vocab].

    *coupled* takes the best by score. *traversal* would be biased by that: its trees have a shape that is fixed before
    and are filled with what is drawn, unless there is nothing to draw.
    """
    logits = with_fixed_corrections(trees, logits)
    row = 0
    for tree in trees:
        rows = logits[row : row + len(tree.frontier)]
        row += len(tree.frontier)
        record = tree.request.sampling.record
        if tree.request.sampling.rule is Rule.TRAVERSAL and record["temperature"] > 0:
            grow_drawn(tree, rows, width)
        else:
            grow_ranked(tree, rows, width)


def grow_ranked(tree: GrowingTree, logits: Tensor, width: int) -> None:
    """The `width` best nodes after the newest level, by score summed along the path.

    A token's score is how far log q + G stays behind the best of its siblings, G being the noise that the target itself
    will draw with; at temperature 0, log q itself.
    """
    ranked = logits.topk(min(_RANKED, logits.shape[1]), dim=-1)
    scores = _scores(tree, ranked.values, ranked.indices)
    best = scores.topk(min(width, scores.shape[1]), dim=-1)
    tokens = ranked.indices.gather(1, best.indices).tolist()
    level = [
        (tree.score(parent) + score, parent, token, None)
        for parent, row_scores, row_tokens in zip(tree.frontier, best.values.tolist(), tokens, strict=True)
        for score, token in zip(row_scores, row_tokens, strict=True)
    ]
    tree.grow(sorted(level, key=lambda node: -node[0])[:width])


def grow_drawn(tree: GrowingTree, logits: Tensor, width: int) -> None:
    """As many nodes after each of the newest level as the shape says, drawn without replacement.

    Where q has fewer tokens than that there are fewer siblings: that much is known before they are drawn.
    """
    shape = fixed_shape(width, tree.most_nodes, tree.most_levels)[tree.depth]
    shaped = shape_rows(logits, row_shape([tree] * len(logits), logits))
    keys = key_tensor(tree.keys(), logits.device)
    level: list[tuple[float, int, int, Drawn | None]] = []
    places: list[int] = []
    for row, (node, place) in enumerate(zip(tree.frontier, tree.places, strict=True)):
        siblings = draw_siblings(shaped, row, keys[row], shape[place])
        level += [(0.0, node, token, q) for token, q in siblings]
        places += range(sum(shape[:place]), sum(shape[:place]) + len(siblings))
    tree.grow(level)
    tree.places = places


def draw_siblings(shaped: Distributions, row: int, key: Tensor, count: int) -> list[tuple[int, Drawn]]:
    """Different tokens with what each was drawn from: the row's distribution without those before it.

    The largest of log q + noise is a draw from q, the second largest one from the rest, and so on.
    """
    kept = kept_tokens(shaped, torch.tensor([row], device=shaped.logits.device))
    ids, noise = kept.ids.cpu().numpy(), gumbel(key, kept.ids).cpu().numpy()
    log_weights = kept.log_weights.cpu().numpy()
    order = np.lexsort((ids, -(log_weights + noise)))[:count]
    weights, siblings = np.exp(log_weights), []
    for slot in order:
        left = weights > 0
        siblings.append((int(ids[slot]), Drawn(ids[left], weights[left] / weights.sum())))
        weights[slot] = 0.0
    return siblings


def _scores(tree: GrowingTree, logits: Tensor, ids: Tensor) -> Tensor:
    """[frontier, ranked], 0 for the best sibling; the largest logits stand first."""
    temperature = float(tree.request.sampling.record["temperature"])
    if temperature == 0:
        return torch.log_softmax(logits.double(), dim=-1)
    keys = key_tensor(tree.keys(), logits.device)
    scores = logits.double() / temperature + gumbel(keys.unsqueeze(1), ids)
    return scores - scores.max(dim=-1, keepdim=True).values


def with_fixed_corrections(trees: Sequence[GrowingTree], logits: Tensor) -> Tensor:
    """Logits with each request's bias and allowed tokens, which hold at every position.

    Penalties and bad words depend on the text and are left to the target: they cost a draft some
    acceptance and never its exactness.
    """
    samplers = [tree.request.sampling for tree in trees for _ in tree.frontier]
    corrected = logits
    for row, sampler in enumerate(samplers):
        if not len(sampler.bias_ids) and sampler.allowed_ids is None:
            continue
        if corrected is logits:
            corrected = logits.clone()
        corrected[row, sampler.bias_ids] += torch.from_numpy(sampler.bias_values).to(logits)
        if sampler.allowed_ids is not None:
            allowed = corrected[row, sampler.allowed_ids]
            corrected[row] = -torch.inf
            corrected[row, sampler.allowed_ids] = allowed
    return corrected


def row_shape(trees: Sequence[GrowingTree], logits: Tensor) -> RowShape:
    """The requests' own temperature, top-k, top-p and min-p, one row for each tree."""
    records = np.array([tree.request.sampling.record for tree in trees])

    def column(name: str) -> Tensor:
        return torch.from_numpy(records[name].copy()).to(logits.device)

    return RowShape(column("temperature"), column("top_k"), column("top_p"), column("min_p"))
