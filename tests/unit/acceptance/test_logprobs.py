"""Log probabilities are the raw model's, for accepted, corrected and bonus tokens alike."""

import pytest
import torch

from foreword.acceptance.judge import judge
from foreword.acceptance.logprobs import request_logprobs, score
from foreword.acceptance.params import SamplingParams
from foreword.speculation.draft import Draft
from helpers.judging import judgement, sampler

PARAMS = SamplingParams(
    temperature=0, logprobs=3, logit_bias={4: 50.0}, repetition_penalty=1.7, presence_penalty=1.0, top_k=2
)


@pytest.mark.parametrize("guesses", [[], [4], [4, 4], [4, 9, 4], [9]])
def test_logprobs_are_those_of_the_raw_logits(guesses: list[int]):
    logits = torch.randn(len(guesses) + 1, 20, generator=torch.Generator().manual_seed(len(guesses)))
    judged = judgement(logits.clone(), [Draft.chain(guesses, 1)], [sampler(PARAMS, 20)])
    verdicts = judge(judged)
    tokens = verdicts.tokens(judged.trees, 0)
    found = request_logprobs(judged, verdicts, 0)
    assert [entry.token for entry in found] == tokens
    for row, entry in enumerate(found):  # a chain: the i-th token was judged by row i
        raw = logits[row].double().log_softmax(-1)
        assert entry.logprob == pytest.approx(float(raw[entry.token]), abs=1e-12)
        assert entry.top_ids.tolist() == raw.topk(3).indices.tolist()
        assert entry.top_logprobs.tolist() == pytest.approx(raw.topk(3).values.tolist(), abs=1e-12)
        assert entry.rank == int((raw > raw[entry.token]).sum()) + 1


def test_a_tree_path_has_the_logprobs_of_its_own_rows():
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(3))
    params = SamplingParams(temperature=0, logprobs=0)
    best = logits.argmax(-1).tolist()
    draft = Draft((19 - best[0], best[0], best[2]), (-1, -1, 1))
    judged = judgement(logits, [draft], [sampler(params, 20)])
    verdicts = judge(judged)
    assert verdicts.paths[0] == [1, 2]
    found = request_logprobs(judged, verdicts, 0)
    rows = [0, 2, 3]
    assert [e.logprob for e in found] == pytest.approx(
        [float(logits[row].double().log_softmax(-1)[best[row]]) for row in rows]
    )


def test_who_wants_none_gets_none():
    judged = judgement(torch.zeros(1, 9), [Draft()], [sampler(SamplingParams(), 9)])
    assert request_logprobs(judged, judge(judged), 0) == []


def test_tokens_that_are_equally_likely_have_the_same_rank():
    row = torch.tensor([2.0, 5.0, 1.0, 5.0, 2.0, 2.0])
    scored = score(row.expand(6, 6), list(range(6)), 1)
    assert [entry.rank for entry in scored] == [3, 1, 6, 1, 3, 3]


@pytest.mark.parametrize("wanted", [0, 1, 5])
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_scores_are_the_log_softmax_of_the_rows(rows: int, wanted: int):
    logits = torch.randn(rows, 301, generator=torch.Generator().manual_seed(rows)) * 8
    tokens = torch.randint(0, 301, (rows,), generator=torch.Generator().manual_seed(wanted)).tolist()
    raw = logits.double().log_softmax(-1)
    for entry, token, row in zip(score(logits, tokens, wanted), tokens, raw, strict=True):
        assert entry.token == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-12)
        assert entry.rank == int((row > row[token]).sum()) + 1
        assert entry.top_ids.tolist() == row.topk(wanted).indices.tolist()
        assert entry.top_logprobs.tolist() == pytest.approx(row.topk(wanted).values.tolist(), abs=1e-12)


def test_a_score_is_the_same_in_any_company():
    logits = torch.randn(40, 1003, generator=torch.Generator().manual_seed(1)) * 5
    together = score(logits, [7] * 40, 0)
    alone = [score(logits[row : row + 1], [7], 0)[0] for row in range(40)]
    assert [entry.logprob for entry in together] == [entry.logprob for entry in alone]


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_failed_request_has_the_logprobs_of_its_accepted_tokens(poison: float):
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(3))
    best = logits.argmax(-1).tolist()
    logits[2] = poison
    params = SamplingParams(temperature=0, logprobs=2)
    judged = judgement(logits, [Draft.chain([best[0], best[1], 0], 1)], [sampler(params, 20)])
    verdicts = judge(judged)
    found = request_logprobs(judged, verdicts, 0)
    assert verdicts.error(0) is not None
    assert [entry.token for entry in found] == verdicts.tokens(judged.trees, 0) == best[:2]
    assert [entry.logprob for entry in found] == pytest.approx(
        [float(logits[row].double().log_softmax(-1)[best[row]]) for row in range(2)]
    )
