import random

import pytest

from foreword.drafters.combined import FallbackDrafter, MergedDrafter, merge
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Drafter
from helpers.asks import ask, text_request


class Saying(Drafter):
    def __init__(self, *drafts: Draft) -> None:
        self.drafts = drafts
        self.asked: list[int] = []
        self.forgotten = 0

    def propose(self, asks):
        self.asked.append(len(asks))
        return [self.drafts[a.request.tokens[0]] for a in asks]

    def forget(self, request):
        self.forgotten += 1


def paths(draft: Draft) -> set[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), token))
    return set(found)


def test_the_first_with_something_to_say_is_heard():
    first = Saying(Draft.chain([1], 1), Draft(), Draft())
    second = Saying(Draft.chain([7], 1), Draft.chain([8, 9], 1), Draft())
    combined = FallbackDrafter([first, second])
    drafts = combined.propose([ask([0]), ask([1]), ask([2])])
    assert [draft.tokens for draft in drafts] == [(1,), (8, 9), ()]
    assert second.asked == [2]  # only for those that the first left open
    combined.forget(text_request([0]))
    assert (first.forgotten, second.forgotten) == (1, 1)


def test_merging_keeps_every_path_once():
    first = Draft.chain([1, 2, 3], 1)
    second = Draft((1, 4, 2, 5), (ROOT, ROOT, 0, 2), 1)
    merged = MergedDrafter([Saying(first), Saying(second)]).propose([ask([0], max_nodes=16)])[0]
    assert paths(merged) == paths(first) | paths(second)
    assert len(merged) == 5
    assert merged.committed_len == 1


@pytest.mark.parametrize("seed", range(8))
def test_a_merged_tree_within_its_budget_has_only_given_paths(seed: int):
    rng = random.Random(seed)

    def tree() -> Draft:
        nodes = rng.randint(0, 12)
        return Draft(
            tuple(rng.randrange(3) for _ in range(nodes)),
            tuple(rng.randint(-1, node - 1) for node in range(nodes)),
            5,
        )

    drafts = [tree(), tree(), tree()]
    whole = merge(drafts, 64)
    assert paths(whole) == set().union(*(paths(draft) for draft in drafts))
    small = merge(drafts, 5)
    assert len(small) <= 5
    assert paths(small) <= paths(whole)
    assert len(paths(small)) == len(small)  # no path twice
