"""EAGLE: a head that reads the target's last hidden states; EAGLE-2 is the same head with a tree."""

from foreword.drafters.heads.loading import HeadConfig, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.resources import DrafterResources


def build_eagle(config: HeadConfig, resources: DrafterResources) -> StepwiseHead:
    """Load the head beside the target."""
    return StepwiseHead(load_head(config.model, "eagle", resources), config.tree_width)
