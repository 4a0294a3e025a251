"""Makes a draft node of a model and a way to draft."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.cluster.address import NodeAddress
from foreword.cluster.handshake import Identity, NodeFacts, TokenIds
from foreword.cluster.node_server import DraftNode
from foreword.cluster.node_service import DraftDesk, NodeLimits
from foreword.cluster.node_session import Pace
from foreword.cluster.security import Security
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.guard.guarded import GuardedDrafter
from foreword.drafters.model.autoregressive import AutoregressiveDrafter, DraftingSize
from foreword.drafters.registry import Guesses, drafter_kinds
from foreword.engine.loader import LoadedModel
from foreword.errors import RequestError
from foreword.speculation.drafting import Drafter, close_all, needs_of

_HEADS = ("eagle", "eagle3", "p_eagle", "medusa", "mtp", "dflash", "dspark")

REFUSED = {
    **dict.fromkeys(_HEADS, "it reads the hidden states of the target's pass"),
    **dict.fromkeys(("jacobi", "lookahead"), "it reads what the target draws in its pass"),
    "grammar": "the form of an answer stays with the target",
    "remote": "a node does not ask other nodes",
}
"""Methods that a node cannot have, and why."""


@dataclass(frozen=True)
class NodeSettings:
    """How a node serves."""

    address: NodeAddress
    security: Security = field(default_factory=Security)
    capacity: int = 256  # requests of all targets
    kv_tokens: int = 32_768  # of a draft model: tokens of all requests that its KV cache holds
    runs_ahead: bool = True
    labels: dict[str, str] = field(default_factory=dict)


def make_node(loaded: LoadedModel, config: SpeculationConfig, settings: NodeSettings) -> DraftNode:
    """A node that listens; `start` lets targets in. With `draft_model`, the loaded model is the one that drafts."""
    check_methods(config.method)
    drafter = _drafter(loaded, config, settings.kv_tokens)
    if needs_of(drafter):
        close_all([drafter])
        raise RequestError(f"{'+'.join(config.method)} cannot draft on a node: it needs the target's pass")
    tokenizer, size = loaded.tokenizer, loaded.vocab_size

    def bytes_of(token: int) -> bytes:
        return tokenizer.token_bytes(token, skip_special_tokens=False)

    limits = NodeLimits(
        size, loaded.decoder.config.context_length, settings.capacity, runs_ahead=settings.runs_ahead
    )
    desk = DraftDesk(drafter, _pace(config), limits)
    identity = Identity(settings.security, TokenIds(size, bytes_of))
    facts = NodeFacts("+".join(config.method), settings.capacity, settings.labels)
    return DraftNode(desk, identity, facts, settings.address)


def check_methods(names: Sequence[str]) -> None:
    """Refuse by name what needs more than a text."""
    for name in names:
        if name in REFUSED:
            raise RequestError(f"{name} cannot draft on a node: {REFUSED[name]}")


def _drafter(loaded: LoadedModel, config: SpeculationConfig, kv_tokens: int) -> Drafter:
    if config.method != ("draft_model",):
        return config.build(loaded.resources())
    width = dict(config.options).get("tree_width", 1)
    size, decoder = DraftingSize(width, kv_tokens), loaded.decoder
    drafting = AutoregressiveDrafter(decoder, loaded.vocab_size, size, decoder.weight_bytes)
    return GuardedDrafter(drafting, "draft_model")


def _pace(config: SpeculationConfig) -> Pace:
    kinds = [drafter_kinds()[name] for name in config.method]
    if all(kind.guesses is Guesses.CHOSEN for kind in kinds):
        return Pace.AT_ONCE
    return Pace.TREES if config.makes_trees else Pace.LEVELS
