"""Where a DSpark tree ends: when the head is sure behind none of its newest nodes."""

from types import SimpleNamespace
from typing import Any

import torch

from foreword.backends.interface import HeadOutput
from foreword.drafters.heads.dflash import DSparkHead
from foreword.drafters.heads.loading import DraftVocabulary
from foreword.speculation.draft import Draft
from helpers.asks import ask, text_request

VOCAB, PLACES = 6, 3


def tree(sure_behind: set[int]) -> Draft:
    """Of a head of width 2 for which 4 and 5 come first everywhere, and which is sure behind these tokens only."""
    head: Any = DSparkHead.__new__(DSparkHead)
    head._width, head._min_confidence = 2, 0.5
    head._confidence_weight = torch.tensor([[0.0, 1.0]])  # reads the token before alone
    head._confidence_bias = None
    head._vocabulary = DraftVocabulary(None, VOCAB, torch.device("cpu"))
    head._runner = SimpleNamespace(
        markov_embeddings=lambda tokens: torch.tensor(
            [[5.0 if one in sure_behind else -5.0] for one in tokens]
        ),
        logits_after=lambda tokens, logits, states: logits,
    )
    output = HeadOutput(torch.arange(VOCAB * 1.0).repeat(PLACES, 1), torch.zeros(PLACES, 1))
    (found,) = head._draft([ask(text_request([1], vocab_size=VOCAB), 9, 9)], [PLACES], output)
    return found


def test_a_tree_goes_on_while_the_head_is_sure_behind_one_of_its_branches():
    assert tree({1, 4, 5}).depth == PLACES
    assert tree({1, 5}).depth == PLACES
    assert tree({1}).depth == 1
    assert tree({4, 5}).depth == 0
