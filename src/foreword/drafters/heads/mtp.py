"""MTP: the module for the token after the next that some models are trained and published with."""

from dataclasses import dataclass, replace

from foreword.backends.batch import Tap
from foreword.drafters.heads.loading import HEAD_BY_LEVEL, check_width, load_head
from foreword.drafters.heads.stepwise import StepwiseHead
from foreword.drafters.registry import DrafterKind, Guesses, is_wide
from foreword.drafters.resources import DrafterResources


@dataclass(frozen=True)
class MtpConfig:
    """Where the module is and what it reads."""

    model: str = ""  # a local path or a hub id; empty: the target's own files
    tree_width: int = 1  # candidates that are followed on every level of the draft; 1 is a chain
    pre_norm: bool = False  # it reads the target's last hidden states before the final norm, not after it

    def __post_init__(self) -> None:
        check_width(self.tree_width)


def build_mtp(config: MtpConfig, resources: DrafterResources) -> StepwiseHead:
    """Load the module beside the target."""
    head = load_head(config.model, "mtp", resources)
    taps = tuple(Tap(tap.layer, not config.pre_norm) for tap in head.taps)
    return StepwiseHead(replace(head, taps=taps), config.tree_width)


KIND = DrafterKind(
    "the MTP module in the target's own checkpoint",
    MtpConfig,
    build_mtp,
    is_wide,
    can_hang=False,
    guesses=Guesses.DRAWN,
    traits=HEAD_BY_LEVEL,
)
