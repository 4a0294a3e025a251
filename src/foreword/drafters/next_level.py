"""Chooses or samples the tokens after the newest nodes of drafts under construction."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.distribution import Distributions, RowParams, draw, kept_tokens, sample, shape_rows
from foreword.acceptance.noise import extend_keys, gumbel, key_tensor
from foreword.acceptance.request import DraftSampling, Record, stacked_records
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Drawn, Floats, Ints
from foreword.drafters.trees import GrowingTree
from foreword.kernels.sampler import sample as native_sample
from foreword.kernels.sampler import sampler_for
from foreword.structured.state import unpacked

_RANKED = 64  # number of most likely tokens that are ranked; noise is computed only for these


def grow_chains(trees: Sequence[GrowingTree], logits: Tensor) -> None:
    """Append one token to each chain, sampled with the request's parameters and its rule's noise.

    `logits` is [trees, vocab]. Under the rules other than *coupled*, a sampled node carries the distribution
    from which it was drawn.
    """
    rules = [tree.request.sampling.rule for tree in trees]  # of each row
    if all(rule is Rule.COUPLED for rule in rules):
        add_tokens(trees, draw_on_device(trees, logits).tolist(), {})
        return
    logits = with_fixed_corrections(trees, logits)
    shaped = shape_rows(logits, row_params(trees), sampler_for(logits))
    keys = np.concatenate([tree.keys() for tree in trees])
    tokens = draw(shaped, keys).tolist()
    greedy_tokens = shaped.greedy_token.tolist()  # -1: the token is sampled
    sampled = [row for row, rule in enumerate(rules) if rule is not Rule.COUPLED and greedy_tokens[row] < 0]
    add_tokens(trees, tokens, _distributions(shaped, sampled))


def can_draw_on_device(tree: GrowingTree) -> bool:
    """Return whether a chain can continue before the host has read its tokens."""
    sampling = tree.request.sampling
    return sampling.rule is Rule.COUPLED and sampling.grammar is None


def draw_on_device(trees: Sequence[GrowingTree], logits: Tensor) -> Tensor:
    """Return the *coupled* sample after each newest node, int64 [trees], on the logits' device; -1: no token possible.

    The host does not wait. `logits` is [trees, vocab].
    """
    logits = with_fixed_corrections(trees, logits)
    sampler, records = sampler_for(logits), stacked_records([tree.request.sampling for tree in trees])
    positions = np.array([len(tree.request.tokens) + tree.depth for tree in trees])
    if sampler is not None:
        return torch.from_numpy(native_sample(sampler, logits, records, positions)[0])
    return sample(logits, _row_params(records), extend_keys(records["stem"], positions))[0]


def add_tokens(trees: Sequence[GrowingTree], tokens: Sequence[int], drawn: Mapping[int, Drawn]) -> None:
    """Append one token to each chain; -1 ends the chain. `drawn` has distributions by row, if the rule needs them."""
    for row, (tree, token) in enumerate(zip(trees, tokens, strict=True)):
        if token < 0:  # no token is possible
            tree.frontier = []
        else:
            tree.grow([(0.0, tree.frontier[0], token, drawn.get(row))])


def _distributions(shaped: Distributions, rows: list[int]) -> dict[int, Drawn]:
    """Return the distribution q of each of these rows; rows without a possible token are left out."""
    kept = kept_tokens(shaped, torch.tensor(rows, dtype=torch.int64, device=shaped.logits.device))
    weights = kept.log_weights.exp().cpu().numpy()
    row_of, ids = kept.rows.cpu().numpy(), kept.ids.cpu().numpy()  # of each kept token
    starts = np.flatnonzero(np.diff(row_of, prepend=-1))  # first kept token of each row
    distributions: dict[int, Drawn] = {}
    for start, end in pairwise([*starts, len(row_of)]):
        total = weights[start:end].sum()
        distributions[int(row_of[start])] = Drawn(ids[start:end], weights[start:end] / total)
    return distributions


def grow_trees(trees: Sequence[GrowingTree], logits: Tensor) -> None:
    """Add a level to each tree; `logits` is [frontier nodes of all trees, vocab].

    Under *coupled* and in greedy sampling, the nodes with the best scores are added. Under *traversal* that would bias
    the output, so its trees have a fixed shape whose nodes are sampled.
    """
    logits = with_fixed_corrections(trees, logits)
    drawn: list[tuple[GrowingTree, Tensor]] = []
    for tree, rows in zip(trees, torch.split(logits, [len(tree.frontier) for tree in trees]), strict=True):
        sampling = tree.request.sampling
        if sampling.rule is Rule.TRAVERSAL and sampling.record["temperature"] > 0:
            drawn.append((tree, rows))
        else:
            grow_ranked(tree, rows)
    if drawn:
        grow_drawn([tree for tree, _ in drawn], torch.cat([rows for _, rows in drawn]))


def grow_ranked(tree: GrowingTree, logits: Tensor) -> None:
    """Offer the best `width` tokens after each node of the newest level to the tree, which keeps as many as fit.

    A token's score is log_softmax(logit / temperature + G) over the `_RANKED` most likely tokens, plus its parent's
    score. G is the noise that the target's sampling will use. At temperature 0 the score uses the logit alone.
    """
    scores, tokens = best_tokens(tree, logits, tree.width)
    level: list[tuple[float, int, int, Drawn | None]] = []  # (score, parent, token, no distribution)
    for parent, row_scores, row_tokens in zip(tree.frontier, scores.tolist(), tokens.tolist(), strict=True):
        for score, token in zip(row_scores, row_tokens, strict=True):
            if score > -math.inf:
                level.append((tree.score(parent) + score, parent, token, None))
    tree.grow(level)


def best_tokens(tree: GrowingTree, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return scores and tokens [frontier, count] after each node of the newest level, best first."""
    ranked = logits.topk(min(_RANKED, logits.shape[1]), dim=-1)
    scores = _scores(tree, ranked.values, ranked.indices)
    best = scores.topk(min(count, scores.shape[1]), dim=-1)
    return best.values, ranked.indices.gather(1, best.indices)


def grow_drawn(trees: Sequence[GrowingTree], logits: Tensor) -> None:
    """Add a level to each tree: as many children per node as the tree's fixed shape has, sampled without replacement.

    If q has fewer tokens than that, all of them become children. So the number of children does not depend on noise.
    """
    shaped = shape_rows(
        logits, row_params([tree for tree in trees for _ in tree.frontier]), sampler_for(logits)
    )
    keys = key_tensor(np.concatenate([tree.keys() for tree in trees]), logits.device)
    kept = kept_tokens(shaped, torch.arange(len(logits), device=logits.device))
    scores = (kept.log_weights + gumbel(keys[kept.rows], kept.ids)).cpu().numpy()
    ids, weights = kept.ids.cpu().numpy(), kept.log_weights.exp().cpu().numpy()
    # The kept tokens of row i are at bounds[i] .. bounds[i + 1].
    bounds = np.searchsorted(kept.rows.cpu().numpy(), np.arange(len(logits) + 1))
    row = 0
    for tree in trees:
        levels = tree.shape()
        shape = levels[tree.depth]
        indices: list[int] = []  # of the new nodes in their level of the fixed shape
        level: list[tuple[float, int, int, Drawn | None]] = []
        for node, index in zip(tree.frontier, tree.shape_indices, strict=True):
            of_row = slice(bounds[row], bounds[row + 1])
            siblings = draw_siblings(ids[of_row], weights[of_row], scores[of_row], shape[index])
            level += [(0.0, node, token, q) for token, q in siblings]
            first = sum(shape[:index])  # the children of earlier nodes come first
            indices += range(first, first + len(siblings))
            row += 1
        tree.grow(level)
        tree.shape_indices = indices
        if tree.depth == len(levels):  # complete, even if q had too few tokens for all nodes
            tree.frontier = []


def draw_siblings(ids: Ints, weights: Floats, scores: Floats, count: int) -> list[tuple[int, Drawn]]:
    """Return `count` distinct tokens, each with its distribution: the weights without those of earlier siblings.

    `scores` are log weights + Gumbel noise. The token with the largest score is a draw, the token with the second
    largest a draw from the other tokens, and so on.
    """
    count = min(count, len(ids))
    best = np.argpartition(-scores, count - 1)[:count] if count else np.empty(0, np.int64)
    remaining, siblings = weights.copy(), []
    for index in best[np.argsort(-scores[best])]:
        is_possible = remaining > 0
        q = remaining[is_possible] / remaining.sum()
        siblings.append((int(ids[index]), Drawn(ids[is_possible], q)))
        remaining[index] = 0.0
    return siblings


def _scores(tree: GrowingTree, logits: Tensor, ids: Tensor) -> Tensor:
    """Return the normalised score of each ranked token, [frontier, ranked]; `ids` are their token ids."""
    temperature = float(tree.request.sampling.record["temperature"])
    scores = logits.double()
    if temperature > 0:
        keys = key_tensor(tree.keys(), logits.device)
        scores = scores / temperature + gumbel(keys.unsqueeze(1), ids)
    return torch.log_softmax(scores, dim=-1)


def are_all_argmax(trees: Sequence[GrowingTree]) -> bool:
    """Return whether all these drafts take the argmax of unchanged logits at every node."""
    samplings = [tree.request.sampling for tree in trees]
    return all(
        sampling.record["temperature"] == 0 and not has_fixed_corrections(sampling) for sampling in samplings
    )


def has_fixed_corrections(sampling: DraftSampling) -> bool:
    """Return whether `with_fixed_corrections` changes the logits."""
    return bool(len(sampling.bias_ids)) or sampling.allowed_ids is not None or sampling.grammar is not None


def with_fixed_corrections(trees: Sequence[GrowingTree], logits: Tensor) -> Tensor:
    """Return the logits with each request's bias, allowed tokens and grammar mask.

    Penalties and bad words depend on the text and are applied only by the target. This lowers acceptance; the output
    stays exact.
    """
    samplings = [tree.request.sampling for tree in trees for _ in tree.frontier]  # of each row
    has_grammar = any(sampling.grammar for sampling in samplings)
    paths = [path for tree in trees for path in tree.paths()] if has_grammar else []
    corrected = logits
    for row, sampling in enumerate(samplings):
        if not has_fixed_corrections(sampling):
            continue
        if corrected is logits:
            corrected = logits.clone()
        corrected[row, sampling.bias_ids] += torch.from_numpy(sampling.bias_values).to(logits)
        if sampling.allowed_ids is not None:
            allowed = corrected[row, sampling.allowed_ids]
            corrected[row] = -torch.inf
            corrected[row, sampling.allowed_ids] = allowed
        if sampling.grammar is not None and (path := paths[row]) is not None:
            mask = torch.from_numpy(unpacked(sampling.grammar.masks_after([path]), logits.shape[1]))
            corrected[row].masked_fill_(~mask[0].to(logits.device), -torch.inf)
    return corrected


def row_params(trees: Sequence[GrowingTree]) -> RowParams:
    """Return temperature, top-k, top-p and min-p of the requests of these trees, one row per entry of `trees`."""
    return _row_params(stacked_records([tree.request.sampling for tree in trees]))


def _row_params(records: Record) -> RowParams:
    def column(name: str) -> Tensor:
        return torch.from_numpy(records[name].copy())

    return RowParams(column("temperature"), column("top_k"), column("top_p"), column("min_p"))
