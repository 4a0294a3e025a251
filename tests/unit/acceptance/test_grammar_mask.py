"""Masks of grammars in the pipeline: for every row its own, and for log probabilities too."""

import math

import numpy as np
import pytest
import torch

from foreword.acceptance.batch import forbid
from foreword.acceptance.judge import judge
from foreword.acceptance.logprobs import request_logprobs
from foreword.acceptance.params import SamplingParams
from foreword.speculation.draft import Draft
from foreword.structured.state import unpacked
from helpers.judging import PLAIN, judgement, sampler
from helpers.masked_rows import MaskedRows


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.7, 0.98, 0.999, 1.0])
@pytest.mark.parametrize("size", [7, 64, 1000])
def test_only_what_the_mask_rules_out_loses_its_chance(share: float, size: int):
    rng = np.random.default_rng(size)
    mask = rng.random((1, size)) < share
    bits = MaskedRows(torch.from_numpy(mask)).masks((), ())
    assert np.array_equal(unpacked(bits, size), mask)
    row = rng.standard_normal(size).astype(np.float32)
    expected = np.where(mask[0], row, -np.inf)
    forbid(row, bits[0])
    assert np.array_equal(row, expected)


def test_a_number_that_is_none_counts_where_its_token_may_come():
    bits = MaskedRows(torch.tensor([[True, False, True]])).masks((), ())
    row = np.array([np.nan, np.nan, 1.0], np.float32)
    forbid(row, bits[0])
    assert not np.isfinite(row[0])
    assert row[0] != -np.inf
    assert row[1:].tolist() == [-np.inf, 1.0]


def test_rows_of_others_keep_their_logits():
    logits = torch.randn(5, 40)
    raw = logits.clone()
    masked = sampler(SamplingParams(temperature=0), 40)
    mask = torch.zeros(3, 40, dtype=torch.bool)
    mask[0, 9] = mask[1, 11] = mask[2, 3] = True
    masked.grammar = MaskedRows(mask)
    plain = sampler(SamplingParams(temperature=0), 40)
    drafts = [PLAIN, Draft.chain((9, 11), 1), PLAIN]
    judged = judgement(logits, drafts, [plain, masked, plain])
    verdicts = judge(judged)
    assert verdicts.tokens(judged.trees, 1) == [9, 11, 3]
    assert torch.equal(judged.logits[[0, 4]], raw[[0, 4]])
    assert verdicts.target_tokens[0] == int(raw[0].argmax())


def test_log_probabilities_are_those_among_the_allowed_tokens():
    logits = torch.randn(1, 40)
    raw = logits.clone()
    asked = sampler(SamplingParams(logprobs=5, logit_bias={4: 3.0}, seed=2), 40)
    mask = torch.zeros(1, 40, dtype=torch.bool)
    mask[0, [4, 7, 8]] = True
    asked.grammar = MaskedRows(mask)
    judged = judgement(logits, [PLAIN], [asked])
    (found,) = request_logprobs(judged, judge(judged), 0)
    expected = torch.log_softmax(raw[0, [4, 7, 8]].double(), dim=0)
    assert sorted(found.top_ids.tolist()) == [4, 7, 8]
    assert found.logprob == pytest.approx(float(expected[[4, 7, 8].index(found.token)]))
    assert math.fsum(math.exp(value) for value in found.top_logprobs) == pytest.approx(1)
