"""P-EAGLE: an EAGLE-3 head that guesses many tokens in one pass, with masks where it would read its own guesses."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.drafters.heads.at_once import guess_at_once
from foreword.drafters.heads.loading import LoadedHead, check_width, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.resources import DrafterResources
from foreword.speculation.draft import Draft
from foreword.speculation.drafting import Ask


@dataclass(frozen=True)
class PEagleConfig:
    """Which head guesses."""

    model: str  # a local path or a hub id
    tree_width: int = 1  # candidates for every place ahead that are followed; 1 is a chain

    def __post_init__(self) -> None:
        check_width(self.tree_width)


class PEagleHead(StepwiseHead):
    """Its rows are EAGLE-3's; behind the newest token's come rows of masks, and all of them guess."""

    def __init__(self, head: LoadedHead, width: int) -> None:
        super().__init__(head, width)
        assert head.spec.mask_token_id is not None and head.mask_features is not None
        self._mask, self._mask_features = head.spec.mask_token_id, head.mask_features

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """A chain, or a tree of `tree_width`; none where the newest token's states are not known."""
        drafts = [Draft()] * len(asks)
        runs = {index: run for index, ask in enumerate(asks) if (run := self._newest(ask)) is not None}
        if not runs:
            return drafts
        asked = [asks[index] for index in runs]
        tails = [
            Draft.chain(
                [self._mask] * min(ask.max_nodes - 1, ask.max_depth - 1, run.pages.kv.reserved - run.end),
                len(ask.request.tokens),
            )
            for ask, run in zip(asked, runs.values(), strict=True)
        ]
        output, _ = self._run_true(list(runs.values()), 1, tails, self._mask_features)
        places = [1 + len(tail) for tail in tails]
        made = guess_at_once(asked, places, output.logits, self._vocabulary, self._width)
        for index, draft in zip(runs, made, strict=True):
            drafts[index] = draft
        return drafts


def build_p_eagle(config: PEagleConfig, resources: DrafterResources) -> PEagleHead:
    """Load the head beside the target."""
    return PEagleHead(load_head(config.model, "p_eagle", resources), config.tree_width)
