"""What a draft model puts behind a node, and what it says that it was drawn from."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch

from foreword.acceptance.params import SamplingParams
from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.control.fixed import FixedPolicy
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftTask
from helpers.asks import text_request
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

    def propose(self, asks: Sequence[DraftTask]) -> list[Draft]:
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


def test_trees_for_traversal_are_drawn_in_a_shape_that_is_fixed_before():
    said = [
        draft for _, draft in overhear(Overheard(TARGET, 3), "traversal", nodes=8, temperature=TEMPERATURE)
    ]
    whole = [draft for draft in said if len(draft) == 8]
    assert len(whole) >= 20
    assert {draft.parents for draft in whole} == {(-1, -1, -1, 0, 0, 1, 3, 3)}
    assert len({draft.tokens for draft in whole}) > 10


def test_siblings_are_different_and_each_tells_what_was_left_to_draw_from():
    law = next_token_law(MarkovDecoder(TARGET), TEMPERATURE)
    youngest = 0
    for text, draft in overhear(Overheard(TARGET, 3), "traversal", nodes=9, temperature=TEMPERATURE):
        for node, (parent, q) in enumerate(zip(draft.parents, draft.drawn, strict=True)):
            line = [*text, *path_tokens(draft, parent)]
            before = [draft.tokens[n] for n in range(node) if draft.parents[n] == parent]
            left = [token for token in range(VOCAB) if token not in before]
            assert draft.tokens[node] in left
            assert q is not None
            assert q.ids.tolist() == left
            expected = law[line[-2], line[-1]][left]
            np.testing.assert_allclose(q.probs, expected / expected.sum(), rtol=1e-6)
            youngest = max(youngest, len(before))
    assert youngest == 2


def test_the_first_branch_of_a_tree_is_the_chain_that_would_have_been_drawn():
    trees = overhear(Overheard(TARGET, 3), "traversal", nodes=9, temperature=TEMPERATURE)[:20]
    chains = overhear(Overheard(TARGET), "block", nodes=3, temperature=TEMPERATURE)[:20]
    for (_, tree), (_, chain) in zip(trees, chains, strict=True):
        assert [tree.tokens[node] for node in (0, 3, 6)] == list(chain.tokens)


def test_cousins_are_drawn_with_noise_of_their_own():
    """What follows does not depend on the token before it here, so that the same noise would draw the same."""
    flat = np.broadcast_to(TARGET[0, 0], TARGET.shape)
    said = overhear(Overheard(flat, 3), "traversal", nodes=6, temperature=TEMPERATURE)
    pairs = [(draft.tokens[3], draft.tokens[5]) for _, draft in said if len(draft) == 6]
    assert {draft.parents for _, draft in said if len(draft) == 6} == {(-1, -1, -1, 0, 0, 1)}
    assert len(pairs) >= 20
    assert any(first != second for first, second in pairs)


def test_where_there_are_too_few_tokens_there_are_fewer_siblings():
    params = {"temperature": TEMPERATURE, "top_k": 2}
    said = overhear(Overheard(TARGET, 3), "traversal", nodes=9, **params)
    assert all(draft.parents.count(parent) <= 2 for _, draft in said for parent in range(-1, 9))
    assert all(draft.depth == 3 for _, draft in said if len(draft) > 5)


def test_greedy_trees_for_traversal_are_the_likeliest_and_chosen():
    said = overhear(Overheard(TARGET, 3), "traversal", nodes=6, temperature=0.0)
    assert all(not draft.drawn for _, draft in said)
    assert said[0][1] == overhear(Overheard(TARGET, 3), "coupled", nodes=6, temperature=0.0)[0][1]


def path_tokens(draft: Draft, node: int) -> list[int]:
    return [] if node < 0 else [*path_tokens(draft, draft.parents[node]), draft.tokens[node]]


class Hesitant(MarkovDecoder):
    """Has no distribution after the token 2."""

    def forward(self, batch: ForwardBatch, store: object) -> ForwardOutput:
        output = super().forward(batch, store)
        output.logits[torch.from_numpy(batch.arrays.token_ids[batch.arrays.logit_rows] == 2)] = -torch.inf
        return output


@pytest.mark.parametrize("decoder", [MarkovDecoder, Hesitant])
def test_chains_that_are_read_at_their_end_are_those_that_are_read_level_by_level(
    decoder: type[MarkovDecoder], monkeypatch: pytest.MonkeyPatch
):
    """Of different lengths beside each other, and those that end early."""
    texts = [[0, 1], [1, 1, 0], [2, 0, 1, 1], [1, 0], [0, 2]]
    asks = [
        DraftTask(text_request(text, vocab_size=VOCAB, temperature=TEMPERATURE, seed=seed), nodes, 8)
        for seed, (text, nodes) in enumerate(zip(texts, (1, 5, 3, 5, 2), strict=True))
    ]

    def drafts() -> list[Draft]:
        drafter = AutoregressiveDrafter(cast(Any, decoder(TARGET)), VOCAB, DraftingSize())
        return drafter.propose(asks)

    unread = drafts()
    monkeypatch.setattr("foreword.drafters.model.levels.can_draw_on_device", lambda tree: False)
    assert unread == drafts()
    lengths = [len(draft) for draft in unread]
    assert lengths == [1, 5, 3, 5, 2] if decoder is MarkovDecoder else min(lengths) < max(lengths)
    assert all(2 not in draft.tokens[:-1] for draft in unread) or decoder is MarkovDecoder
