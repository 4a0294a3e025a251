"""The one call that judges every draft of a step: logits to distributions to verdicts."""

from dataclasses import dataclass

import numpy as np

from foreword.acceptance import block, coupled, token
from foreword.acceptance.batch import Judgement, RowStatus, Verdicts
from foreword.acceptance.chains import ChainRows, draw_leftover, leftover
from foreword.acceptance.distribution import Distributions, distributions
from foreword.acceptance.draw import draw
from foreword.acceptance.noise import Keys, Stream, absorbed, stems, uniforms
from foreword.acceptance.rules import Rule, check_exact
from foreword.acceptance.trees import NO_ROW, NO_TOKEN, Bools, Ints


@dataclass
class _Outcome:
    """Verdicts as the rules fill them in, each for its own requests."""

    stop_rows: Ints  # [requests]
    own_tokens: Ints  # [requests]


def judge(judged: Judgement) -> Verdicts:
    """Judge the drafts of a batch: the pipeline for all rows, then every request's own rule."""
    trees, rules = judged.trees, judged.records["rule"]
    is_coupled = rules == Rule.COUPLED
    if not is_coupled.all():
        for rule in np.unique(rules):
            check_exact(Rule(rule), bool(trees.is_chain[rules == rule].all()))
    shaped = distributions(judged)
    outcome = _Outcome(trees.roots.copy(), np.full(len(trees.roots), NO_TOKEN, np.int64))
    if is_coupled.any():
        _run_coupled(judged, shaped, is_coupled, outcome)
    if not is_coupled.all():
        _run_chain_rules(judged, shaped, outcome)
    return _verdicts(judged, shaped, outcome)


def _run_coupled(judged: Judgement, shaped: Distributions, mine: Bools, outcome: _Outcome) -> None:
    draws: Ints = draw(shaped, _keys(judged, Stream.TARGET)).cpu().numpy()
    stops = coupled.stop_rows(judged.trees, draws)
    outcome.stop_rows[mine] = stops[mine]
    outcome.own_tokens[mine] = draws[stops[mine]]


def _run_chain_rules(judged: Judgement, shaped: Distributions, outcome: _Outcome) -> None:
    """*token* and *block* side by side: they share the probabilities and the noise, and no request."""
    trees, rules = judged.trees, judged.records["rule"]
    rows = np.flatnonzero(rules[trees.request_of_row] != Rule.COUPLED)
    chains = ChainRows.of(shaped, trees, rows)
    # A node is accepted with the number of its own position, which its parent's logits are about.
    judged_by = np.maximum(trees.parents, 0)
    chance = uniforms(_keys(judged, Stream.ACCEPT))[judged_by]
    own_keys = _keys(judged, Stream.RESIDUAL)
    for rule, its in ((Rule.TOKEN, token), (Rule.BLOCK, block)):
        mine = rules == rule
        if mine.any():
            nodes = np.flatnonzero(mine[trees.request_of_row] & (trees.depths > 0))
            plan = its.plan(chains, nodes)
            outcome.stop_rows[mine] = its.stop_rows(trees, plan.accept, chance)[mine]
            left = leftover(trees, plan, outcome.stop_rows[mine])
            outcome.own_tokens[mine] = draw_leftover(chains, left, own_keys)


def _keys(judged: Judgement, stream: Stream) -> Keys:
    """[rows], the keys of one stream at every row's position."""
    records = judged.records
    if stream is Stream.TARGET:
        stem = records["stem"]
    else:
        stem = stems(records["seed"], records["sample"], stream, records["nonce"])
    return absorbed(stem[judged.trees.request_of_row], judged.positions)


def _verdicts(judged: Judgement, shaped: Distributions, outcome: _Outcome) -> Verdicts:
    trees = judged.trees
    status: Ints = shaped.status.cpu().numpy()[outcome.stop_rows]
    paths = trees.paths_to(outcome.stop_rows)
    nodes = np.where(paths == NO_ROW, NO_TOKEN, paths - trees.roots[:, None] - 1)
    own = np.where(status == RowStatus.OK, outcome.own_tokens, NO_TOKEN)
    return Verdicts(outcome.stop_rows, nodes, own, status)
