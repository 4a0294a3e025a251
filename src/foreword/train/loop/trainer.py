"""Trains a learner on batches of the target's texts, with a loss for each draft token.

A *learner* has the weights that are trained to draft for a frozen target (`train.heads.learner`). A *tail row* is a row
of a text from which an answer's tokens are drafted (`train.passes.packing`). A *level* is a position in the chain of
draft tokens; the first is 0.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from foreword.models.heads.writing import rounded_levels
from foreword.train.heads.learner import Learner
from foreword.train.loop.evaluate import TauReport, measure_tau
from foreword.train.passes.loss import CHUNK, OutputLoss, row_losses, target_probabilities
from foreword.train.passes.packing import BatchSize, PackedBatch, batches
from foreword.train.passes.target import CachedFeatures, Features
from foreword.train.texts.documents import Document


@dataclass
class TrainPhase:
    """Length and learning rate of a training phase. The rate decays only if the phase is final."""

    seconds: float | None = None  # time limit; None: none
    last_step: int | None = None  # the phase ends before this step; None: no limit
    final: bool = False  # the phase ends with a decaying learning rate
    decay_share: float = 0.4  # fraction of the phase with a decaying rate
    clock: Callable[[], float] = time.monotonic
    first_step: int = 0  # step at which the phase begins
    stop: Callable[[], bool] = lambda: False  # returns whether to end before the next step
    _begin: float = field(init=False)

    def __post_init__(self) -> None:
        self._begin = self.clock()

    def is_over(self, step: int) -> bool:
        return self.stop() or self.done(step) >= 1.0

    def rate(self, step: int) -> float:
        """Return the learning-rate factor of the next step, between 0.02 and 1."""
        if not self.final:
            return 1.0
        return max(0.02, min(1.0, (1.0 - self.done(step)) / self.decay_share))

    def done(self, step: int) -> float:
        """Return the completed fraction, by time or by steps, whichever is larger."""
        fractions = [0.0]
        if self.seconds is not None:
            fractions.append((self.clock() - self._begin) / max(self.seconds, 1e-9))
        if self.last_step is not None:
            length = self.last_step - self.first_step
            fractions.append((step - self.first_step) / length if length > 0 else 1.0)
        return max(fractions)


_COEFFICIENTS = (
    3.4445,
    -4.7750,
    2.0315,
)  # coefficients of the Newton-Schulz iteration, as published with Muon


@dataclass(frozen=True)
class LearningRates:
    """Learning rates of Muon and AdamW."""

    muon: float = 0.02
    adam: float = 1e-3


class HeadOptimizer:
    """Muon for matrices and AdamW for other parameters, with one learning-rate factor for warm-up and decay."""

    def __init__(self, matrices: Sequence[Tensor], others: Sequence[Tensor], rates: LearningRates) -> None:
        self._matrices = list(matrices)
        self._rates = rates
        self._momentum = [torch.zeros_like(matrix) for matrix in matrices]
        fused = all(tensor.is_cuda for tensor in others)
        self._adam = torch.optim.AdamW(
            list(others), lr=rates.adam, betas=(0.9, 0.95), weight_decay=0.0, fused=fused
        )
        self._all = [*matrices, *others]

    def clip(self, norm: float) -> Tensor:
        """Clip all gradients to a joint norm; return their norm before clipping."""
        unclipped: Tensor = torch.nn.utils.clip_grad_norm_(self._all, norm)
        return unclipped

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply the gradients, with learning rates times `factor`, and reset them."""
        for matrix, momentum in zip(self._matrices, self._momentum, strict=True):
            if matrix.grad is None:
                continue
            momentum.lerp_(matrix.grad, 0.05)
            direction = matrix.grad.lerp(momentum, 0.95)
            scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.sub_(orthogonalized(direction) * (self._rates.muon * factor * scale))
        for group in self._adam.param_groups:
            group["lr"] = self._rates.adam * factor
        self._adam.step()
        for tensor in self._all:
            tensor.grad = None

    def state(self) -> dict[str, object]:
        return {"momentum": self._momentum, "adam": self._adam.state_dict()}

    def load(self, state: dict[str, object]) -> None:
        saved = state["momentum"]
        assert isinstance(saved, list)
        for momentum, old in zip(self._momentum, saved, strict=True):
            momentum.copy_(old)
        adam = state["adam"]
        assert isinstance(adam, dict)
        self._adam.load_state_dict(adam)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return approximately the nearest semi-orthogonal matrix (Newton-Schulz iteration)."""
    a, b, c = _COEFFICIENTS
    x = matrix.bfloat16() if matrix.is_cuda else matrix.float()
    is_tall = x.shape[0] > x.shape[1]
    x = x.t() if is_tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):  # as published with Muon
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.t() if is_tall else x).to(matrix.dtype)
    return result


@dataclass(frozen=True)
class TrainSettings:
    """Hyperparameters of a training."""

    depth: int = 4  # draft tokens per chain
    level_decay: float = 0.85  # each draft token's loss has this times the weight of the one before
    rates: LearningRates = field(default_factory=LearningRates)
    clip: float = 1.0  # maximum norm of the gradient
    warm_up: int = 50  # steps
    sharpness: float = 1.0  # exponent on the target's probabilities
    seed: int = 0
    compiled: bool = False  # use torch.compile
    round_bits: int | None = None  # bits of the weights while the learning rate decays; None: not rounded
    kept_bytes: int = 0  # maximum bytes of cached target states, which are computed once for all epochs


@dataclass(frozen=True)
class TrainProgress:
    """Means over the steps since the last report."""

    step: int
    loss: float  # loss of the first draft token, per answer token
    hits: tuple[float, ...]  # fraction of right tokens at each level, given that all levels before are right
    gradient: float  # norm before clipping
    rows_per_second: float
    steps_per_second: float
    rate: float  # learning-rate factor of the newest step


class Trainer:
    """Runs training steps of a learner; its state can be saved and restored."""

    def __init__(
        self, learner: Learner, documents: Sequence[Document], size: BatchSize, settings: TrainSettings
    ) -> None:
        self.learner, self.size, self.settings = learner, size, settings
        self.target = learner.target
        self.step = 0
        self._depth = learner.loss_steps(settings.depth)
        if settings.round_bits is not None:  # raises an error now for shapes that cannot be rounded
            for matrix in learner.matrices.values():
                rounded_levels(matrix[:1].detach(), settings.round_bits)
        self._documents = documents
        self._row_losses = torch.compile(row_losses, dynamic=False) if settings.compiled else row_losses
        self._output_matrix = self.target.weights.head[learner.vocabulary.token_ids]
        self._optimizer = HeadOptimizer(
            list(learner.matrices.values()), learner.other_parameters(), settings.rates
        )
        # Order of the batches: (seed, step at which the order begins, number of texts).
        self._order = (settings.seed, 0, len(documents))
        # Fraction of tail rows whose draft tokens of all earlier levels are right, for each level.
        self._right_before = [1.0] * self._depth
        self._generator = torch.Generator(self.target.device).manual_seed(settings.seed)

    def train(
        self,
        phase: TrainPhase,
        report_every: int = 50,
        on_report: Callable[[TrainProgress], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        """Train until the phase ends; `on_step` is called after every step with its number."""
        seed, first, _ = self._order
        skip = self.step - first  # continue the same order after an interruption
        source = batches(self._documents, self.size, (seed, first), self.target.device, skip)
        cache = CachedFeatures(self.target, self.learner.taps, self.settings.kept_bytes)
        sums: list[Tensor] = []
        begin, begun_at = time.monotonic(), self.step
        while not phase.is_over(self.step):
            warm = min(1.0, (self.step + 1) / self.settings.warm_up)
            rate = phase.rate(self.step)
            if rate < 1.0:  # train with rounded weights, since the result will be rounded
                self.learner.round_bits = self.settings.round_bits
            factor = rate * warm
            number, batch = next(source)
            sums.append(self._train_step(batch, cache.of(number, batch), factor))
            self.step += 1
            if self.step % report_every == 0:
                means = torch.stack(sums).mean(0).tolist()
                sums.clear()
                speed = (self.step - begun_at) / (time.monotonic() - begin)
                progress = self._progress(means, speed, factor)
                begin, begun_at = time.monotonic(), self.step
                if on_report is not None:
                    on_report(progress)
            if on_step is not None:
                on_step(self.step)

    def evaluate(self, documents: Sequence[Document]) -> TauReport:
        """Return tokens per pass along these documents."""
        return measure_tau(self.learner, documents, self.size, self.settings.depth)

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on."""
        return {
            "step": self.step,
            "head": self.learner.state_dict(),
            "optimizer": self._optimizer.state(),
            "alive": self._right_before,
            "order": self._order,
            "generator": self._generator.get_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore another trainer's state."""
        self.step = state["step"]
        self.learner.load_state_dict(state["head"])
        self._optimizer.load(state["optimizer"])
        self._right_before = state["alive"]
        self._order = tuple(state["order"])
        if self._order[2] != len(self._documents):  # the texts changed: start a new order
            self._order = (self.settings.seed, self.step, len(self._documents))
        self._generator.set_state(state["generator"].cpu())

    def _train_step(self, batch: PackedBatch, features: Features, factor: float) -> Tensor:
        """Run one training step.

        Return one tensor: the loss of the first level, the gradient norm, for every level the number of rows whose
        chain is right before it, then for every level the number whose chain is right after it.
        """
        losses, right_before, right_after = self._losses(batch, features)
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        gradient = self._optimizer.clip(self.settings.clip)
        self._optimizer.step(factor)
        return torch.stack([losses[0].detach(), gradient.detach(), *right_before, *right_after])

    def _losses(
        self, batch: PackedBatch, features: Features
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Return for each level the loss, and the numbers of rows whose chain is right before and after it."""
        settings, draft_ids = self.settings, self.learner.vocabulary.draft_ids
        next_rows = (batch.tail_rows + 1).clamp(max=self.size.rows - 1)
        wanted = target_probabilities(
            self.target, features.last[next_rows], self._output_matrix, settings.sharpness
        )
        is_right = torch.ones(self.size.tails, dtype=torch.bool, device=self.target.device)  # chains so far
        losses, right_before, right_after = [], [], []
        for level, states in enumerate(self.learner.steps(batch, features, self._depth)):
            token_ids, in_answer = batch.predicted(level)
            labels = draft_ids[token_ids]
            is_right &= in_answer
            right_before.append(is_right.sum().float())
            has_label = in_answer & (labels >= 0)
            rows = self._rows(level, is_right, has_label)
            scale = settings.level_decay**level / max(batch.num_answer_tokens, 1)
            weights = has_label[rows] * scale
            loss, hits = OutputLoss.apply(  # type: ignore[no-untyped-call]
                states[rows],
                self.learner.output(level),
                wanted,
                (rows + level).clamp(max=self.size.tails - 1),
                labels[rows],
                weights,
                self._row_losses,
            )
            previous = batch.input_tokens(level)[rows]
            selection = self.learner.selection_loss(level, states[rows], labels[rows], previous, weights)
            if selection is not None:
                loss = loss + selection
            is_hit = torch.zeros_like(is_right).index_copy_(0, rows, hits)
            is_right = is_right & is_hit
            right_after.append(is_right.sum().float())
            losses.append(loss)
        return losses, right_before, right_after

    def _rows(self, level: int, is_right: Tensor, has_label: Tensor) -> Tensor:
        """Return the tail rows with a loss: those whose chain is right so far, padded with others.

        Tokens after a wrong one are never accepted, so their loss matters less.
        """
        size = self._output_rows(level)
        if size == self.size.tails:
            return torch.arange(size, device=is_right.device)
        noise = torch.rand(len(is_right), device=is_right.device, generator=self._generator)
        # Right chains first, then other rows with a label, in random order.
        return torch.topk(is_right * 4.0 + has_label * 2.0 + noise, size, sorted=False).indices

    def _output_rows(self, level: int) -> int:
        """Return the number of tail rows with logits at a level, rounded up to whole chunks of the loss."""
        # A margin over the fraction that was right in the last report, so that nearly all right rows have logits.
        share = 1.0 if level == 0 else min(1.0, 1.15 * self._right_before[level] + 0.03)
        return min(-(-round(self.size.tails * share) // CHUNK) * CHUNK, self.size.tails)

    def _progress(self, means: list[float], speed: float, factor: float) -> TrainProgress:
        """Return a report, and update the fractions that `_output_rows` reads; `means` are of `_train_step`."""
        loss, gradient, *by_level = means
        before, after = by_level[: self._depth], by_level[self._depth :]
        self._right_before = [count / self.size.tails for count in before]
        shares = tuple(hits / max(count, 1e-9) for hits, count in zip(after, before, strict=True))
        return TrainProgress(self.step, loss, shares, gradient, speed * self.size.rows, speed, factor)
