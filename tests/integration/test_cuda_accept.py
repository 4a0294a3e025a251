"""On a CUDA device judging waits once, for the tokens; everything before is only handed over."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from foreword.acceptance.batch import Judgement
from foreword.acceptance.corrections import corrected_logits
from foreword.acceptance.judge import draw_rows, judge
from foreword.acceptance.params import SamplingParams
from foreword.speculation.draft import Draft
from helpers.judging import judgement, sampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

VOCAB = 5003
BATCHES = {
    "greedy": [SamplingParams(temperature=0)] * 3,
    "sampled": [
        SamplingParams(temperature=0.7, top_p=0.9),
        SamplingParams(top_k=40),
        SamplingParams(min_p=0.1),
    ],
    "mixed": [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.9, top_p=0.8, top_k=50),
        SamplingParams(),
    ],
    "corrected": [
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(logit_bias={5: 3.0, 9: -2.0}, min_tokens=4, stop_token_ids=(7,)),
        SamplingParams(allowed_token_ids=(1, 2, 3, 50)),
    ],
}
DRAFTS = [Draft(), Draft.chain([4, 5, 6], 1), Draft((4, 5, 6, 1), (-1, -1, 0, 1))]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any wait for the device is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def judged_batch(name: str, device: str) -> Judgement:
    rows = sum(len(draft) + 1 for draft in DRAFTS)
    logits = 4 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(6))
    logits[:3, [4, 5, 6]] += 20  # some guesses are right
    return judgement(logits.to(device), DRAFTS, [sampler(params, VOCAB) for params in BATCHES[name]])


@pytest.mark.parametrize("name", BATCHES)
def test_nothing_waits_before_the_tokens_come_out(name: str):
    judged = judged_batch(name, "cuda")
    judge(judged)  # the first use of a kernel may wait
    torch.cuda.synchronize()
    with no_waiting():
        draw_rows(judged, corrected_logits(judged))


@pytest.mark.parametrize("name", BATCHES)
def test_a_device_judges_as_the_cpu_does(name: str):
    here, there = (judge(judged_batch(name, device)) for device in ("cpu", "cuda"))
    assert (here.paths, here.target_tokens, here.statuses) == (
        there.paths,
        there.target_tokens,
        there.statuses,
    )
