"""What of a draft gets a row where the form of the answer is prescribed."""

import numpy as np
import torch

from foreword.acceptance.params import SamplingParams
from foreword.acceptance.request import RequestSampler, TokenLimits
from foreword.acceptance.rules.rule import Rule
from foreword.acceptance.rules.trees import Drawn
from foreword.drafters.lookup.grammar import GrammarDrafter
from foreword.drafters.next_level import grow_chains, grow_trees
from foreword.drafters.trees import GrowingTree
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import DraftRequest, DraftTask
from foreword.speculation.proposing import usable_part
from foreword.structured.params import StructuredOutputs
from helpers.tiny_grammars import END, PIECES, encode, grammars

KEPT = grammars()
A, B, C, X = (PIECES.index(piece) for piece in (b"a", b"b", b"c", b"x"))


def ask(regex: str, rule: Rule = Rule.COUPLED, temperature: float = 1.0, nodes: int = 8) -> DraftTask:
    wanted = StructuredOutputs(regex=regex)
    params = SamplingParams(structured=wanted, temperature=temperature)
    limits = TokenLimits(len(PIECES), (END,))
    sampler = RequestSampler(params, limits, [A], 3, rule=rule, grammar=KEPT.begin(wanted))
    return DraftTask(DraftRequest(1, [A], sampler.drafting(), 1), nodes, nodes)


def test_a_chosen_node_that_cannot_come_costs_no_row():
    tree = Draft((C, X, C, X, C), (-1, -1, 0, 0, 1), 1)
    kept = usable_part(tree, ask("(c|cx)*"))
    assert kept.tokens == (C, C, X)
    assert kept.parents == (-1, 0, 0)


def test_a_drawn_node_stays_whatever_its_token_is():
    q = Drawn(np.array([C, X]), np.array([0.5, 0.5]))
    chain = Draft.chain((C, X, C), 1, drawn=(q, q, q))
    kept = usable_part(chain, ask("c+", Rule.TOKEN))
    assert kept.tokens == (C, X)  # behind what cannot come nobody looks
    assert len(kept.drawn) == 2


def test_what_must_come_is_guessed():
    (draft,) = GrammarDrafter().propose([ask("abc[ax]")])
    assert draft.tokens == tuple(encode("abc"))
    (short,) = GrammarDrafter().propose([ask("xcxcx", nodes=2)])
    assert short.tokens == (X, C)
    (none,) = GrammarDrafter().propose([ask("[cx]+")])
    assert none.tokens == ()


def test_what_is_drawn_is_drawn_from_what_may_come():
    """Chains and trees, for every rule; the logits would have anything else."""
    allowed = {A, B, PIECES.index(b"ab"), PIECES.index(b"ba")}
    for rule in (Rule.COUPLED, Rule.TOKEN, Rule.TRAVERSAL):
        for temperature in (0.0, 1.0):
            for width, grow in ((1, grow_chains), (3, grow_trees)):
                if width > 1 and rule is Rule.TOKEN:
                    continue
                tree = GrowingTree(ask("[ab]{5,9}", rule, temperature), width)
                for _ in range(2):
                    logits = torch.zeros(len(tree.frontier), len(PIECES))
                    logits[:, [X, C]] = 9.0
                    grow([tree], logits)
                assert tree.tokens
                assert set(tree.tokens) <= allowed
                drawn = [q for q in tree.draft().drawn if q is not None]
                assert all(set(q.ids.tolist()) <= allowed for q in drawn)
