"""Creates a draft node from a model and a drafter's configuration."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.cluster.address import NodeAddress
from foreword.cluster.handshake import NodeFacts, PeerIdentity, TokenIds
from foreword.cluster.node_server import DraftNode
from foreword.cluster.node_service import DraftService, NodeLimits
from foreword.cluster.node_session import Pace
from foreword.cluster.security import Security
from foreword.drafters.config import SpeculationConfig
from foreword.drafters.guard import GuardedDrafter
from foreword.drafters.registry import TokenSelection, drafter_kinds
from foreword.engine.loader import LoadedModel
from foreword.errors import RequestError
from foreword.speculation.drafting import Drafter


@dataclass(frozen=True)
class NodeSettings:
    """Settings of a draft node."""

    address: NodeAddress
    security: Security = field(default_factory=Security)
    capacity: int = 256  # maximum requests of all targets together
    kv_tokens: int = 32_768  # KV cache size of a draft model in tokens, over all requests
    runs_ahead: bool = True  # draft beyond the requested depth
    labels: dict[str, str] = field(default_factory=dict)  # shown to targets


def make_node(loaded: LoadedModel, config: SpeculationConfig, settings: NodeSettings) -> DraftNode:
    """Create a draft node that listens on its address; `start` makes it accept targets.

    `loaded` is the draft model. Raise `RequestError` if the drafter needs the target's passes.
    """
    check_methods(config.method)
    drafter = _drafter(loaded, config, settings.kv_tokens)
    if drafter.traits.needs:
        drafter.close()
        raise RequestError(f"{'+'.join(config.method)} cannot draft on a node: it needs the target's pass")
    tokenizer, vocab_size = loaded.tokenizer, loaded.vocab_size

    def bytes_of(token: int) -> bytes:
        return tokenizer.token_bytes(token, skip_special_tokens=False)

    context_length = loaded.decoder.config.context_length
    limits = NodeLimits(vocab_size, context_length, settings.capacity, runs_ahead=settings.runs_ahead)
    service = DraftService(drafter, _pace(config), limits)
    identity = PeerIdentity(settings.security, TokenIds(vocab_size, bytes_of))
    facts = NodeFacts("+".join(config.method), settings.capacity, settings.labels)
    return DraftNode(service, identity, facts, settings.address)


def check_methods(names: Sequence[str]) -> None:
    """Raise `RequestError` for a drafter that cannot run on a draft node."""
    for name in names:
        kind = drafter_kinds().get(name)
        if kind is not None and kind.traits.needs_target:
            raise RequestError(f"{name} cannot draft on a node: {kind.traits.needs_target}")


def _drafter(loaded: LoadedModel, config: SpeculationConfig, kv_tokens: int) -> Drafter:
    """Create the drafter: its variant for draft nodes if it has one, otherwise the usual one."""
    name = config.method[0]
    build = drafter_kinds()[name].build_on_node
    if len(config.method) > 1 or build is None:
        return config.build(loaded.resources())
    return GuardedDrafter(build(config.settings_of(name), loaded.resources(), kv_tokens), name)


def _pace(config: SpeculationConfig) -> Pace:
    """Return how much the node drafts in one call of the drafter: the whole draft, one level, or a tree."""
    kinds = [drafter_kinds()[name] for name in config.method]
    if all(kind.selection is TokenSelection.CHOSEN for kind in kinds):
        return Pace.AT_ONCE
    return Pace.TREES if config.makes_trees else Pace.LEVELS
