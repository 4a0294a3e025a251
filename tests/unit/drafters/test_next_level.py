"""What a draft model puts behind a node, and what it says that it was drawn from."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from foreword.acceptance.params import SamplingParams
from foreword.control.fixed import FixedPolicy
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask
from helpers.engines import ask, core_on, run
from helpers.markov_pair import TEMPERATURE, VOCAB, MarkovDecoder, next_token_law, peaked_logits

PROMPT = (0, 1)
TARGET, PADDED = peaked_logits(seed=1), peaked_logits(seed=3, padding=2)


class Overheard(AutoregressiveDrafter):
    """Remembers what it was asked and what it said."""

    def __init__(self, logits: np.ndarray, width: int = 1) -> None:
        decoder: Any = MarkovDecoder(logits)
        super().__init__(decoder, VOCAB, DraftingSize(width))
        self.said: list[tuple[list[int], Draft]] = []  # text and draft

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = super().propose(asks)
        self.said += [(list(ask.request.tokens), draft) for ask, draft in zip(asks, drafts, strict=True)]
        return drafts


def overhear(drafter: Overheard, rule: str, nodes: int = 3, **params: Any) -> list[tuple[list[int], Draft]]:
    target: Any = MarkovDecoder(TARGET)
    core = core_on(target, policy=FixedPolicy(drafter, nodes), acceptance_rule=rule)
    for seed in range(20):
        ask(core, PROMPT, SamplingParams(max_tokens=6, seed=seed, ignore_eos=True, **params))
    run(core)
    assert not core.faults
    return drafter.said


@pytest.mark.parametrize(("rule", "width"), [("token", 1), ("block", 1), ("coupled", 1), ("coupled", 3)])
def test_ids_behind_the_targets_vocabulary_are_never_guessed(rule: str, width: int):
    said = overhear(Overheard(PADDED, width), rule, nodes=6, temperature=TEMPERATURE)
    assert max(token for _, draft in said for token in draft.tokens) < VOCAB
    assert max((int(q.ids[-1]) for _, draft in said for q in draft.drawn if q is not None), default=0) < VOCAB


@pytest.mark.parametrize("logits", [TARGET, PADDED], ids=["the same vocabulary", "padding behind it"])
def test_a_node_tells_what_its_own_token_was_drawn_from(logits: np.ndarray):
    law = next_token_law(MarkovDecoder(logits[:, :, :VOCAB]), TEMPERATURE)
    levels = 0
    for text, draft in overhear(Overheard(logits), "token", temperature=TEMPERATURE):
        line = [*text, *draft.tokens]
        for node, q in enumerate(draft.drawn):
            before, last = line[len(text) + node - 2 : len(text) + node]
            assert q is not None
            assert q.ids.tolist() == list(range(VOCAB))
            np.testing.assert_allclose(q.probs, law[before, last], rtol=1e-6)
            levels = max(levels, node + 1)
    assert levels == 3


def test_what_is_chosen_has_no_distribution():
    """At temperature 0, and under *coupled*, which asks for none."""
    assert all(not draft.drawn for _, draft in overhear(Overheard(TARGET), "token", temperature=0.0))
    assert all(not draft.drawn for _, draft in overhear(Overheard(TARGET), "coupled"))
