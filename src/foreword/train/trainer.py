"""Training a head: batches of the target's own texts, its states recomputed, a loss for every guess of a chain."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from foreword.train.checkpoints import load_state, save_state
from foreword.train.documents import Document
from foreword.train.eagle3 import ChainPass, Eagle3Head
from foreword.train.evaluate import TauReport, measure_tau
from foreword.train.loss import CHUNK, OutputLoss, judge_rows, target_probabilities
from foreword.train.optimizer import HeadOptimizer, Rates
from foreword.train.packing import BatchSize, PackedBatch, batches
from foreword.train.schedule import Stretch
from foreword.train.target import Features, Target
from foreword.train.vocabulary import DraftVocabulary


@dataclass(frozen=True)
class TrainSettings:
    """How a head is trained."""

    depth: int = 4  # guesses of a chain
    step_decay: float = 0.85  # weight of each further guess
    rates: Rates = field(default_factory=Rates)
    clip: float = 1.0
    warm_up: int = 50  # steps
    sharpness: float = 1.0  # exponent on the target's probabilities
    seed: int = 0
    compiled: bool = False


@dataclass(frozen=True)
class TrainProgress:
    """Means since the last report."""

    step: int
    loss: float  # of the first guess, per answer token
    hits: tuple[float, ...]  # by guess: right, given that all before it were
    gradient: float
    rows_per_second: float
    steps_per_second: float
    rate: float  # learning-rate factor
    teraflops: float  # multiplications and additions of matrix products, attention left out


class Trainer:
    """Owns a head while it is trained."""

    def __init__(
        self,
        target: Target,
        head: Eagle3Head,
        vocabulary: DraftVocabulary,
        documents: Sequence[Document],
        size: BatchSize,
        settings: TrainSettings,
    ) -> None:
        self.target, self.head, self.size = target, head, size
        self.vocabulary = vocabulary.to(target.device)
        self.settings = settings
        self.step = 0
        self.chain = ChainPass(target, head, compiled=settings.compiled)
        self._measured_chain = ChainPass(target, head)  # compiling it again without gradients would not pay
        self._documents = documents
        self._judge = torch.compile(judge_rows, dynamic=False) if settings.compiled else judge_rows
        self._kept_rows = target.weights.head[self.vocabulary.token_ids]
        others = [*head.norms.values(), head.lm_head]
        self._optimizer = HeadOptimizer(list(head.matrices.values()), others, settings.rates)
        self._order = (
            settings.seed,
            0,
            len(documents),
        )  # seed of the order, its first step, texts it is about
        self._alive = [1.0] * settings.depth  # share of tail rows whose chain holds up to each guess
        self._generator = torch.Generator(target.device).manual_seed(settings.seed)

    def train(
        self,
        stretch: Stretch,
        *,
        report_every: int = 50,
        on_report: Callable[[TrainProgress], None] | None = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        """Go on until the stretch is over; `on_step` is called after every step, with its number."""
        seed, first, _ = self._order
        skip = self.step - first  # the same order as without an interruption
        source = batches(self._documents, self.size, (seed, first), self.target.device, skip)
        sums: list[Tensor] = []
        begin, begun_at = time.monotonic(), self.step
        while not stretch.is_over(self.step):
            factor = stretch.rate(self.step) * min(1.0, (self.step + 1) / self.settings.warm_up)
            sums.append(self._one(next(source), factor))
            self.step += 1
            if self.step % report_every == 0:
                means = torch.stack(sums).mean(0).tolist()
                sums.clear()
                elapsed = time.monotonic() - begin
                speed = (self.step - begun_at) / elapsed
                progress = self._progress(means, speed, factor)
                begin, begun_at = time.monotonic(), self.step
                if on_report is not None:
                    on_report(progress)
            if on_step is not None:
                on_step(self.step)

    def evaluate(self, documents: Sequence[Document]) -> TauReport:
        """Tokens per pass along these documents."""
        return measure_tau(
            self.target,
            self.head,
            self._measured_chain,
            self.vocabulary.token_ids,
            documents,
            self.size,
            self.settings.depth,
        )

    def save(self, path: Path) -> None:
        """Everything that the next step depends on."""
        state: dict[str, Any] = {
            "step": self.step,
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state(),
            "alive": self._alive,
            "order": self._order,
            "generator": self._generator.get_state(),
            "vocabulary": self.vocabulary.token_ids,
            "coverage": self.vocabulary.coverage,
            "size": [self.size.rows, self.size.tails],
        }
        save_state(path, state)

    def load(self, path: Path) -> None:
        state = load_state(path, self.target.device)
        self.step = state["step"]
        self.head.load_state_dict(state["head"])
        self._optimizer.load(state["optimizer"])
        self._alive = state["alive"]
        self._order = tuple(state["order"])
        if self._order[2] != len(self._documents):  # texts came or went: another order from here on
            self._order = (self.settings.seed, self.step, len(self._documents))
        self._generator.set_state(state["generator"].cpu())

    def _one(self, batch: PackedBatch, factor: float) -> Tensor:
        """One step; sums for the report: loss, gradient norm, then alive rows and hits by guess."""
        features = self.target.forward(batch.token_ids, batch.positions, batch.texts, self.head.shape.taps)
        losses, alive, hits = self._losses(batch, features)
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
        gradient = self._optimizer.clip(self.settings.clip)
        self._optimizer.step(factor)
        return torch.stack([losses[0].detach(), gradient.detach(), *alive, *hits])

    def _losses(
        self, batch: PackedBatch, features: Features
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        settings, vocabulary = self.settings, self.vocabulary
        after = (batch.tail_rows + 1).clamp(max=self.size.rows - 1)
        wanted = target_probabilities(features.last[after], self._kept_rows, settings.sharpness)
        living = torch.ones(self.size.tails, dtype=torch.bool, device=self.target.device)
        losses, alive, all_hits = [], [], []
        for step, states in enumerate(self.chain.steps(batch, features, settings.depth)):
            token_ids, counts = batch.predicted(step)
            labels = vocabulary.draft_ids[token_ids]
            living &= counts
            alive.append(living.sum().float())
            rows = self._rows(step, living, counts & (labels >= 0))
            scale = settings.step_decay**step / max(batch.num_answer_tokens, 1)
            loss, hits = OutputLoss.apply(  # type: ignore[no-untyped-call]
                states[rows],
                self.head.lm_head,
                wanted,
                (rows + step).clamp(max=self.size.tails - 1),
                labels[rows],
                (counts & (labels >= 0))[rows] * scale,
                self._judge,
            )
            right = torch.zeros_like(living).index_copy_(0, rows, hits)
            living = living & right
            all_hits.append(living.sum().float())
            losses.append(loss)
        return losses, alive, all_hits

    def _rows(self, step: int, living: Tensor, counts: Tensor) -> Tensor:
        """Tail rows for the output matrix: those whose chain still holds, and some others to fill up.

        Where an earlier guess was wrong, the target never sees the later ones.
        """
        size = self._output_rows(step)
        if size == self.size.tails:
            return torch.arange(size, device=living.device)
        noise = torch.rand(len(living), device=living.device, generator=self._generator)
        return torch.topk(living * 4.0 + counts * 2.0 + noise, size, sorted=False).indices

    def _output_rows(self, step: int) -> int:
        """How many tail rows of a step get logits: a whole number of chunks."""
        share = 1.0 if step == 0 else min(1.0, 1.15 * self._alive[step] + 0.03)
        return min(-(-round(self.size.tails * share) // CHUNK) * CHUNK, self.size.tails)

    def _progress(self, means: list[float], speed: float, factor: float) -> TrainProgress:
        depth = self.settings.depth
        loss, gradient, alive, hits = means[0], means[1], means[2 : 2 + depth], means[2 + depth :]
        self._alive = [count / self.size.tails for count in alive]
        return TrainProgress(
            self.step,
            loss,
            tuple(hit / max(count, 1e-9) for hit, count in zip(hits, alive, strict=True)),
            gradient,
            speed * self.size.rows,
            speed,
            factor,
            speed * self._step_flops() / 1e12,
        )

    def _step_flops(self) -> float:
        rows, tails, matrices = self.size.rows, self.size.tails, self.head.matrices
        layers = [tensor for layer in self.target.weights.layers for tensor in vars(layer).values()]
        target = sum(int(tensor.numel()) for tensor in layers if tensor is not None)
        slot = sum(matrices[name].numel() for name in ("fc", "k_proj", "v_proj"))
        step = sum(matrix.numel() for name, matrix in matrices.items() if name != "fc")
        output = tails + 3 * sum(self._output_rows(step) for step in range(self.settings.depth))
        head = 6 * (rows * slot + self.settings.depth * tails * step)
        return float(2 * rows * target + head + 2 * output * self.head.lm_head.numel())
