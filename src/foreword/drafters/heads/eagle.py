"""EAGLE: a head that reads the target's last hidden states; EAGLE-2 is the same head with a tree."""

from dataclasses import dataclass

from foreword.drafters.heads.loading import check_width, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.resources import DrafterResources


@dataclass(frozen=True)
class EagleConfig:
    """Which head guesses."""

    model: str  # a local path or a hub id
    tree_width: int = 1  # candidates that are followed on every level of the draft; 1 is a chain

    def __post_init__(self) -> None:
        check_width(self.tree_width)


def build_eagle(config: EagleConfig, resources: DrafterResources) -> StepwiseHead:
    """Load the head beside the target."""
    return StepwiseHead(load_head(config.model, "eagle", resources), config.tree_width)
