"""Decides which draft tokens of a step are accepted: from logits to distributions to verdicts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from foreword.acceptance.batch import Judgement, RowStatus, Verdicts
from foreword.acceptance.corrections import corrected_logits
from foreword.acceptance.distribution import KeptTokens, RowParams, best_per_row, sample, shape_rows
from foreword.acceptance.noise import Keys, Stream, branch_keys, extend_keys, key_tensor, stems, uniforms
from foreword.acceptance.rules import block, coupled, token, traversal
from foreword.acceptance.rules.chains import ChainRows, leftover_weights
from foreword.acceptance.rules.rule import Rule, check_exact
from foreword.acceptance.rules.trees import NO_TOKEN, Floats, Ints
from foreword.acceptance.transfer import HostCopy
from foreword.kernels import sampler as native
from foreword.kernels.placement import placement_of

_COUPLED = int(Rule.COUPLED)


@dataclass
class _PartialVerdicts:
    """Verdicts under construction; each rule fills in the requests that use it."""

    stops: list[int]  # [requests], last accepted row
    target_tokens: list[int]  # [requests], the target's own token after this row
    statuses: list[int]  # [requests], RowStatus of this row
    draws: list[int] = field(default_factory=list)  # [rows], the *coupled* sample after every row


def judge(judged: Judgement) -> Verdicts:
    """Return the verdicts of a batch: run the sampling pipeline for all rows, then each request's rule."""
    return Judging(judged).verdicts()


class Judging:
    """Acceptance in two halves: work that can be launched on a device, and work that waits for it."""

    def __init__(self, judged: Judgement) -> None:
        self.judged = judged
        rules = set(judged.records["rule"].tolist())  # those that any request uses
        self._needs_draws = _COUPLED in rules or judged.wants_draws
        self._other_rules = [Rule(rule) for rule in sorted(rules - {_COUPLED})]
        self._logits: Tensor | None = None  # corrected logits, once computed
        self._draws: HostCopy | None = None  # result of `draw_rows`, once launched

    def begin(self) -> None:
        """Launch the *coupled* draws, if they run on a device; raise if a rule is not exact for its draft."""
        self._check()
        is_on_device = self.judged.sampler is None and not placement_of(self.judged.logits.device).is_host
        if self._needs_draws and is_on_device:
            self._draw()

    @property
    def drawn_tokens(self) -> Tensor:
        """Return the *coupled* sample after every row, int64 [rows], on the logits' device, without waiting for it."""
        return self._draw().on_device[0]

    def set_draft_tokens(self, tokens: Sequence[Sequence[int]]) -> None:
        """Set the draft tokens, which were not known on the host when the draws started."""
        self.judged.trees = self.judged.trees.with_tokens(tokens)

    def verdicts(self) -> Verdicts:
        """Wait for the device and return the verdicts."""
        self._check()
        trees, requests = self.judged.trees, len(self.judged.records)
        if self._needs_draws:
            partial = _run_coupled(self.judged, self._draw().on_host())
        else:
            partial = _PartialVerdicts(
                trees.starts[:-1], [NO_TOKEN] * requests, [int(RowStatus.OK)] * requests
            )
        if self._other_rules:
            _run_other_rules(self.judged, self._corrected(), self._other_rules, partial)
        return Verdicts.at(trees, partial.stops, partial.target_tokens, partial.statuses, partial.draws)

    def _check(self) -> None:
        """Raise `RequestError` if a rule is not exact for the shape of one of its drafts."""
        for rule in self._other_rules:
            has_rule = self.judged.records["rule"] == rule
            check_exact(rule, bool(self.judged.trees.is_chain[has_rule].all()))

    def _corrected(self) -> Tensor:
        if self._logits is None:
            self._logits = corrected_logits(self.judged)
        return self._logits

    def _draw(self) -> HostCopy:
        if self._draws is None:
            self._draws = HostCopy.begin(draw_rows(self.judged, self._corrected()))
        return self._draws


def draw_rows(judged: Judgement, logits: Tensor) -> Tensor | Ints:
    """Sample a token after every row under *coupled*; return the tokens and their RowStatus, int64 [2, rows].

    Launches the work on the device of the corrected `logits`, and does not wait for it. The native sampler skips rows
    after a rejected draft token, because their samples are not used.
    """
    if judged.sampler is not None:
        trees = judged.trees
        needs_all_rows = trees.is_plain or judged.wants_draws
        drafted = None if needs_all_rows else (trees.parent_list, trees.token_list)
        return native.sample(judged.sampler, logits, judged.row_records, judged.positions, drafted)
    return sample(logits, RowParams.of(judged), _keys(judged, Stream.TARGET))


def _run_coupled(judged: Judgement, drawn: Tensor | Ints) -> _PartialVerdicts:
    """Apply *coupled* to all requests; `_run_other_rules` overwrites the requests of other rules.

    `drawn` [2, rows] has sampled tokens and their RowStatus.
    """
    draws, statuses = drawn.tolist()
    stops = coupled.stop_rows(judged.trees, draws)
    return _PartialVerdicts(stops, [draws[row] for row in stops], [statuses[row] for row in stops], draws)


def _run_other_rules(
    judged: Judgement, logits: Tensor, other_rules: Sequence[Rule], partial: _PartialVerdicts
) -> None:
    """Apply every rule except *coupled* to the requests that use it, and write their verdicts into `partial`."""
    trees, rules = judged.trees, judged.records["rule"]
    rows = np.flatnonzero(rules[trees.request_of_row] != Rule.COUPLED)
    shaped = shape_rows(logits, RowParams.of(judged), judged.sampler)
    statuses = shaped.status.tolist()
    chains = ChainRows.of(shaped, trees, rows)
    # A node is accepted with the noise of its position. `_keys` returns, at each row, the key of the position that the
    # row predicts: a node's key is therefore at its parent's row.
    accept_keys = _keys(judged, Stream.ACCEPT)[np.maximum(trees.parents, 0)]
    residual_keys = key_tensor(_keys(judged, Stream.RESIDUAL), chains.totals.device)
    for rule in other_rules:
        requests = np.flatnonzero(rules == rule)
        if rule is Rule.TRAVERSAL:
            chance = uniforms(branch_keys(accept_keys, trees.branches))
            stops, residuals = _run_traversal(chains, requests, chance)
        else:
            stops, residuals = _run_chain_rule(chains, rule, requests, uniforms(accept_keys))
        token_at = best_per_row(residuals, residual_keys).tolist()  # [all rows]
        for request, stop in zip(requests.tolist(), stops.tolist(), strict=True):
            partial.stops[request] = stop
            partial.target_tokens[request] = token_at[stop]
            partial.statuses[request] = statuses[stop]


def _run_chain_rule(chains: ChainRows, rule: Rule, requests: Ints, chance: Floats) -> tuple[Ints, KeptTokens]:
    """Return the last accepted row [requests] under *token* or *block*, and the residual distributions at these rows.

    `chance` has one random number in (0, 1) per row of the batch.
    """
    trees, rule_module = chains.trees, token if rule is Rule.TOKEN else block
    nodes = np.flatnonzero(np.isin(trees.request_of_row, requests) & (trees.depths > 0))
    plan = rule_module.plan(chains, nodes)
    stops = rule_module.stop_rows(trees, plan.accept, chance)[requests]
    return stops, leftover_weights(chains, plan, stops)


def _run_traversal(chains: ChainRows, requests: Ints, chance: Floats) -> tuple[Ints, KeptTokens]:
    """Return the same as `_run_chain_rule`, under *traversal*."""
    plan = traversal.plan(chains, requests)
    stops = traversal.stop_rows(chains.trees, requests, plan.accept, chance)
    return stops, traversal.leftover_weights(chains, plan, stops)


def _keys(judged: Judgement, stream: Stream) -> Keys:
    """Return the keys of a noise stream, [rows], each at the position of the token that the row predicts."""
    if stream is Stream.TARGET:
        return extend_keys(judged.row_records["stem"], judged.positions)
    records = judged.records
    stem = stems(records["seed"], records["sample"], stream, records["nonce"])
    return extend_keys(stem[judged.trees.request_of_row], judged.positions)
