"""DSpark: a DFlash head that also knows which token goes well behind which, and when to stop."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.backends.interface import HeadOutput
from foreword.drafters.heads.at_once import grow_levels, new_trees
from foreword.drafters.heads.dflash import DFlashHead
from foreword.drafters.heads.head_tree import HeadTree
from foreword.drafters.heads.loading import HEAD, LoadedHead, check_width, load_head
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources
from foreword.errors import RequestError
from foreword.models.heads.spec import CONFIDENCE
from foreword.speculation.draft import ROOT, Draft
from foreword.speculation.drafting import Ask


@dataclass(frozen=True)
class DSparkConfig:
    """Which head guesses, and how sure it has to be."""

    model: str = ""  # a local path or a hub id; empty: the head shipped for the target
    tree_width: int = 1  # candidates for every place of the block that are followed; 1 is a chain
    confidence: float = 0.0  # a draft ends before the first place where the head is less sure than this

    def __post_init__(self) -> None:
        check_width(self.tree_width)
        if not 0 <= self.confidence < 1:
            raise RequestError(f"confidence must be at least 0 and below 1, not {self.confidence}")


class DSparkHead(DFlashHead):
    """The places of a block are no longer guessed each for itself: the token before has a say."""

    def __init__(self, head: LoadedHead, width: int, confidence: float) -> None:
        super().__init__(head, width)
        self._sureness = head.own.get(CONFIDENCE + ".weight")
        self._bias = head.own.get(CONFIDENCE + ".bias")
        self._confidence = confidence
        if confidence > 0 and self._sureness is None:
            raise RequestError("confidence: this head has no confidence head; leave it out")
        self._in_one_call &= confidence == 0

    def _guess(self, asks: Sequence[Ask], places: Sequence[int], output: HeadOutput) -> list[Draft]:
        trees, firsts = new_trees(asks, places, self._width)

        def level(going: Sequence[HeadTree], rows: list[int]) -> Tensor:
            before = self._runner.markov_before([token for tree in going for token in _tokens(tree)])
            return self._vocabulary.spread(output.logits[rows] + self._runner.markov_after(before))

        def is_worth(tree: HeadTree, row: int) -> bool:
            if self._confidence == 0:
                return True
            sure = self._sure(output.states[row], self._runner.markov_before(_tokens(tree)))
            return bool((sure >= self._confidence).any())

        grow_levels(trees, firsts, level, self._width > 1, is_worth)
        return [tree.draft() for tree in trees]

    def _sure(self, state: Tensor, before: Tensor) -> Tensor:
        """[nodes], how likely the token at this place is to be accepted behind each of these."""
        assert self._sureness is not None
        read = state.float().expand(len(before), -1)
        if self._sureness.shape[1] > read.shape[1]:
            read = torch.cat((read, before), dim=-1)
        bias = 0.0 if self._bias is None else self._bias
        return torch.sigmoid(read @ self._sureness[0] + bias)


def _tokens(tree: HeadTree) -> list[int]:
    """The tokens of the newest nodes; of the root, the newest of the text."""
    return [tree.request.tokens[-1] if node == ROOT else tree.tokens[node] for node in tree.frontier]


def build_dspark(config: DSparkConfig, resources: DrafterResources) -> DSparkHead:
    """Load the head beside the target."""
    head = load_head(config.model, "dspark", resources)
    return DSparkHead(head, config.tree_width, config.confidence)


KIND = DrafterKind(
    "a DFlash head with a Markov head over the tokens of a block",
    DSparkConfig,
    build_dspark,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=HEAD,
)
