"""How much each rule accepts, against what theory promises."""

from dataclasses import dataclass

import numpy as np
import torch

from foreword.acceptance.noise import Stream, absorbed, gumbel, key_tensor, stems
from foreword.acceptance.rules.drawn import Floats
from foreword.proofs.cases import Case
from foreword.proofs.draft_models import DraftModel
from foreword.proofs.enumeration import step_law


@dataclass(frozen=True)
class Agreement:
    """How often two distributions draw the same token with shared noise."""

    distance: float  # total variation
    agreed: float  # share of draws
    error: float  # standard error of that share

    @property
    def bound(self) -> float:
        """What sharing Gumbel noise guarantees."""
        return (1 - self.distance) / (1 + self.distance)


def expected_accepted(case: Case, draft: DraftModel, length: int) -> float:
    """Draft tokens that one step accepts in expectation, by enumeration."""
    law = step_law(case, draft, case.prompt, length)
    return sum((len(tokens) - 1) * chance for tokens, chance in law.items())


def coupled_agreement(p: Floats, q: Floats, draws: int, seed: int) -> Agreement:
    """*Coupled* at one position: target and drafter draw from p and q with the same noise."""
    keys = key_tensor(absorbed(stems(seed, 0, Stream.TARGET, 0), np.arange(draws)))
    ids = torch.arange(len(p)).expand(draws, len(p))
    noise = gumbel(keys[:, None].expand_as(ids), ids).numpy()
    with np.errstate(divide="ignore"):
        same = np.argmax(np.log(p) + noise, axis=1) == np.argmax(np.log(q) + noise, axis=1)
    distance = float(np.abs(p - q).sum() / 2)
    agreed = float(same.mean())
    return Agreement(distance, agreed, float(np.sqrt(agreed * (1 - agreed) / draws)))
