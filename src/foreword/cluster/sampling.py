"""How a request draws, on its way to a node and there."""

import numpy as np

from foreword.acceptance.request import RECORD, DraftSampling
from foreword.acceptance.rules.rule import Rule
from foreword.cluster.messages import Sampling


def told(sampling: DraftSampling) -> Sampling:
    """What a node hears.

    Under *coupled* it draws with the request's own noise, so that ids are all that has to come back. The other rules
    would be biased by a node that knows their noise: it hears nothing of it and chooses the likeliest tokens.
    """
    record = sampling.record
    is_coupled = sampling.rule is Rule.COUPLED
    return Sampling(
        sampling.vocab_size,
        float(record["temperature"]) if is_coupled else 0.0,
        float(record["top_p"]),
        float(record["min_p"]),
        int(record["top_k"]),
        int(record["stem"]) if is_coupled else 0,
        sampling.bias_ids.tolist(),
        sampling.bias_values.tolist(),
        None if sampling.allowed_ids is None else sampling.allowed_ids.tolist(),
    )


def heard(sampling: Sampling, vocab_size: int) -> DraftSampling:
    """What a node's drafter draws with; raises `ValueError` for what cannot be."""
    size = min(sampling.vocab_size, vocab_size)
    ids = (*sampling.bias_ids, *(sampling.allowed_ids or ()))
    if size < 1 or len(sampling.bias_ids) != len(sampling.bias_values) or max(ids, default=0) >= size:
        raise ValueError("sampling parameters outside the vocabulary")
    if not (
        sampling.stem < 1 << 64 and np.isfinite([sampling.temperature, sampling.top_p, sampling.min_p]).all()
    ):
        raise ValueError("sampling parameters that are no numbers")
    record = np.zeros((), RECORD)
    record["temperature"], record["top_p"], record["min_p"] = (
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
    )
    record["top_k"] = min(sampling.top_k or size, size)
    record["stem"], record["rule"], record["logprobs"] = sampling.stem, int(Rule.COUPLED), -1
    allowed = None if sampling.allowed_ids is None else np.array(sampling.allowed_ids, np.int64)
    return DraftSampling(
        size,
        record.tobytes(),
        np.array(sampling.bias_ids, np.int64),
        np.array(sampling.bias_values, np.float64),
        allowed,
        Rule.COUPLED,
    )
