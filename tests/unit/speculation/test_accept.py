"""Which rows of a pass are judged, and with whose parameters."""

import torch

from foreword.acceptance.params import SamplingParams
from foreword.kv.paged_cache import PagedCache
from foreword.speculation.accept import Acceptance
from foreword.speculation.draft import NO_DRAFT, Draft
from foreword.speculation.requests import PassEntry
from helpers.requests import lone_request

VOCAB = 8


def test_requests_are_judged_with_their_own_parameters_beside_others_that_sample_nothing():
    cache, entries = PagedCache(16), []
    for token, run in ((1, 2), (2, 3), (3, 1), (4, 3)):  # the first and the third read a part of their prompt
        params = SamplingParams(temperature=0, logit_bias={token: 10.0}, max_tokens=9)
        request = lone_request([5, 6, 7], params, vocab_size=VOCAB)
        request.kv = cache.open()
        entries.append(PassEntry.of(request, run))
    drafts = [NO_DRAFT, Draft.chain([2, 2, 4], 3), NO_DRAFT, Draft.chain([4, 3], 3)]
    logits = torch.zeros((4 + 3, VOCAB))
    verdicts = Acceptance.begin(logits, entries, drafts).verdicts()
    assert [verdict.tokens for verdict in verdicts] == [(), (2, 2, 2), (), (4, 4)]
    assert [verdict.path for verdict in verdicts] == [(), (0, 1), (), (0,)]
