"""The `remote` method: draft nodes on this or other machines."""

from foreword.cluster.settings import RemoteConfig, need_frames
from foreword.cluster.shared_nodes import NodesUse
from foreword.drafters.registry import DrafterResources, chosen_kind
from foreword.speculation.drafting import Drafter


def build_remote(config: RemoteConfig, resources: DrafterResources) -> Drafter:
    """Create a drafter that uses the nodes, and start to connect to them; nodes that cannot be reached are retried."""
    need_frames()
    from foreword.cluster.handshake import PeerIdentity, TokenIds
    from foreword.cluster.remote_drafter import RemoteDrafter

    security = config.security()
    tokenizer = resources.checkpoint.tokenizer()

    def bytes_of(token: int) -> bytes:
        return tokenizer.token_bytes(token, skip_special_tokens=False)

    identity = PeerIdentity(security, TokenIds(resources.vocab_size, bytes_of))
    return resources.nodes.use(config, lambda: RemoteDrafter(config, identity).start())


# Draft tokens of nodes arrive without q, so they count as chosen. Nodes send trees only under rules that accept them.
KIND = chosen_kind(NodesUse, "draft nodes, on this machine or others", RemoteConfig, build_remote)
