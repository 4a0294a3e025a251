"""Guesses for many places at once: chains, and the best nodes of independent distributions."""

from itertools import product
from math import log

import pytest
import torch

from foreword.drafters.heads.growing import draft_at_once
from foreword.drafters.heads.loading import DraftVocabulary
from foreword.speculation.draft import ROOT, Draft
from helpers.asks import ask, text_request

VOCAB = 6
KNOWN = DraftVocabulary(None, VOCAB, torch.device("cpu"))


def random_logits(places: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(places, VOCAB, generator=torch.Generator().manual_seed(seed))


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    return paths


@pytest.mark.parametrize("nodes", [1, 4, 11, 30])
def test_a_tree_has_the_best_paths_of_the_product(nodes: int):
    logits = random_logits(3)
    (draft,) = draft_at_once([ask([1, 2], nodes, 9)], [3], logits, KNOWN, VOCAB)
    shares = logits.double().softmax(-1).tolist()
    paths = [path for length in (1, 2, 3) for path in product(range(VOCAB), repeat=length)]
    scores = {path: sum(log(shares[place][token]) for place, token in enumerate(path)) for path in paths}
    assert sorted(paths_of(draft)) == sorted(sorted(paths, key=lambda path: -scores[path])[:nodes])


def test_every_request_reads_its_own_rows():
    first, second = random_logits(2, seed=1), random_logits(3, seed=2)
    asks = [ask([1, 2], 8, 9), ask([1, 2, 3], 8, 2)]
    made = draft_at_once(asks, [2, 3], torch.cat((first, second)), KNOWN, 1)
    assert made[0].tokens == tuple(first.argmax(-1).tolist())
    assert made[1].tokens == tuple(second.argmax(-1).tolist()[:2])
    assert [draft.committed_len for draft in made] == [2, 3]


@pytest.mark.parametrize("width", [1, 2])
def test_a_place_without_numbers_ends_the_guesses(width: int):
    logits = random_logits(3)
    logits[1] = -torch.inf
    (draft,) = draft_at_once([ask(text_request([1, 2], vocab_size=VOCAB), 9, 9)], [3], logits, KNOWN, width)
    assert {len(path) for path in paths_of(draft)} == {1}
