"""Drafts that stand for guesses of full size."""

import pytest
import torch

from foreword.acceptance.transfer import HostCopy
from foreword.engine.preparing import FullSizeDrafter
from foreword.speculation.draft import DeviceTokens, Draft
from foreword.speculation.drafting import Drafter, DraftTask
from foreword.speculation.requests import draft_request_of
from helpers.requests import lone_request


class Says(Drafter):
    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def propose(self, asks: list[DraftTask]) -> list[Draft]:
        return [self.draft for _ in asks]

    def forget(self, request: object) -> None: ...


def asked(draft: Draft | None, nodes: int, depth: int, branches: bool = False) -> Draft:
    ask = DraftTask(draft_request_of(lone_request([1, 2])), nodes, depth)
    return FullSizeDrafter(None if draft is None else Says(draft), branches=branches).propose([ask])[0]


@pytest.mark.parametrize("said", [None, Draft(), Draft.chain([4], 2)])
def test_what_is_missing_is_made_up(said: Draft | None):
    chain = asked(said, 4, 3)
    assert chain.is_chain and len(chain) == 3 and chain.committed_len == 2
    tree = asked(said, 4, 3, branches=True)
    assert not tree.is_chain and len(tree) == 4 and tree.depth == 3
    assert len(asked(said, 4, 4, branches=True)) == 4


def test_what_is_full_stays():
    chain, tree = Draft.chain([4, 5], 2), Draft((4, 5), (-1, -1), 2)
    assert asked(chain, 2, 2) is chain
    assert asked(tree, 2, 1, branches=True) is tree
    pending = Draft.on_device(DeviceTokens(HostCopy.begin(torch.tensor([4])), (0,)), 2)
    assert asked(pending, 3, 3) is pending
