"""EAGLE-3: a head that reads the target's hidden states at a low, a middle and a high layer."""

from dataclasses import dataclass

from foreword.drafters.heads.loading import check_width, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.resources import DrafterResources


@dataclass(frozen=True)
class Eagle3Config:
    """Which head guesses."""

    model: str  # a local path or a hub id
    tree_width: int = 1  # candidates that are followed on every level of the draft; 1 is a chain

    def __post_init__(self) -> None:
        check_width(self.tree_width)


def build_eagle3(config: Eagle3Config, resources: DrafterResources) -> StepwiseHead:
    """Load the head beside the target."""
    return StepwiseHead(load_head(config.model, "eagle3", resources), config.tree_width)
