"""How families describe their mixtures of experts."""

from dataclasses import dataclass
from enum import Enum, auto

from foreword.models.architectures.switch import NEVER, Switch
from foreword.models.config import GroupScore, Scores


class DenseLayers(Enum):
    """Which layers have one MLP instead of experts."""

    NONE = auto()
    FIRST = auto()  # `first_k_dense_replace` says how many
    BY_STEP = auto()  # those that `mlp_only_layers` names, and those between `decoder_sparse_step`s


class Grouping(Enum):
    """Whether experts are chosen in groups."""

    NONE = auto()
    ALWAYS = auto()  # by `n_group` and `topk_group`
    BY_METHOD = auto()  # if `topk_method` is group_limited_greedy


@dataclass(frozen=True)
class ExpertKeys:
    """Which keys of config.json say what about a mixture."""

    count: tuple[str, ...]  # the first that is there
    size: str = "moe_intermediate_size"
    per_token: str = "num_experts_per_tok"
    scores: Scores = Scores.SOFTMAX
    normalize: Switch = NEVER
    corrected: bool = False
    scale: str | None = None
    grouping: Grouping = Grouping.NONE
    group_score: GroupScore = GroupScore.MAX
    shared_size: str | None = None  # width of the shared expert
    shared_count: str | None = None  # or how many experts wide it is
    shared_gate: bool = False
    dense: DenseLayers = DenseLayers.NONE
