"""EAGLE-3: a head that reads the target's hidden states at a low, a middle and a high layer."""

from foreword.drafters.heads.loading import HEAD_BY_LEVEL, HeadConfig, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources


def build_eagle3(config: HeadConfig, resources: DrafterResources) -> StepwiseHead:
    """Load the head beside the target."""
    return StepwiseHead(load_head(config.model, "eagle3", resources), config.tree_width)


KIND = DrafterKind(
    "an EAGLE-3 head on the target's hidden states",
    HeadConfig,
    build_eagle3,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=HEAD_BY_LEVEL,
)
