"""Small judgements for tests, and their distributions as dense rows."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from foreword.acceptance.batch import Judgement
from foreword.acceptance.distribution import distributions
from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.chains import ChainRows
from foreword.acceptance.rules.rule import Rule
from foreword.speculation.draft import Draft, stack

PLAIN = Draft()


def sampler(
    params: SamplingParams, vocab: int, prompt: Sequence[int] = (1,), *, rule: Rule = Rule.COUPLED, **limits
) -> RequestSampler:
    seed = 7 if params.seed is None else params.seed
    return RequestSampler(params, TokenLimits(vocab, **limits), prompt, seed, rule=rule)


def judgement(logits: Tensor, drafts: Sequence[Draft], samplers: Sequence[RequestSampler]) -> Judgement:
    return Judgement.of(logits, stack(drafts), samplers)


def dense_probabilities(judged: Judgement) -> np.ndarray:
    """float64 [rows, vocab], what every row draws from."""
    shaped = distributions(judged)
    chains = ChainRows.of(shaped, judged.trees, np.arange(len(judged.logits)))
    dense = torch.zeros(judged.logits.shape, dtype=torch.float64)
    kept = chains.kept
    dense[kept.rows, kept.ids] = kept.log_weights.exp() / chains.totals[kept.rows]
    return dense.numpy()
