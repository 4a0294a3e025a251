"""EAGLE: a head that reads the target's last hidden states; EAGLE-2 is the same head with a tree."""

from foreword.drafters.heads.loading import HEAD_BY_LEVEL, HeadConfig, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources


def build_eagle(config: HeadConfig, resources: DrafterResources) -> StepwiseHead:
    """Load the head beside the target."""
    return StepwiseHead(load_head(config.model, "eagle", resources), config.tree_width)


KIND = DrafterKind(
    "an EAGLE-1 or EAGLE-2 head on the target's last hidden states",
    HeadConfig,
    build_eagle,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=HEAD_BY_LEVEL,
)
