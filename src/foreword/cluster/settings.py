"""User settings of the drafter that uses draft nodes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.cluster.address import NodeAddress
from foreword.cluster.assignment import LABELS
from foreword.errors import RequestError
from foreword.speculation.settings import REQUIRED, DrafterSettings, at_least, setting

if TYPE_CHECKING:
    from foreword.cluster.security import Security


@dataclass(frozen=True)
class RemoteConfig(DrafterSettings):
    """Node addresses, protection, and excluded tenants."""

    drafters: str = setting(
        REQUIRED, "host:port or unix:/path, separated by commas; or @FILE with one per line, which is re-read"
    )
    shadow: int = setting(
        8, "drafts of a new node that are compared with the text before any is verified", at_least(0)
    )
    labels: str = setting("", "location of this target, to prefer near nodes: host=a,rack=b,zone=c")
    local_tenants: str = setting("", "tenant patterns (commas, * and ?) whose texts stay on this machine")
    token_file: str = setting("", "file with the cluster token; empty: FOREWORD_CLUSTER_TOKEN")
    tls_certificate: str = setting("", "PEM file with this target's certificate")
    tls_key: str = setting("", "PEM file with the certificate's key")
    tls_authority: str = setting("", "PEM file of the cluster's authority")
    insecure: bool = setting(False, "allow nodes on other machines without token and TLS")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.addresses() and not self.is_listed:
            raise RequestError("speculation: drafters must name at least one draft node")
        parse_labels(self.labels)

    @property
    def is_listed(self) -> bool:
        """Whether the addresses are in a file, which may change."""
        return self.drafters.startswith("@")

    def addresses(self) -> list[NodeAddress]:
        """Return the addresses of the nodes, each once."""
        texts = _read_list(Path(self.drafters[1:])) if self.is_listed else entries(self.drafters)
        return list(dict.fromkeys(map(NodeAddress.parse, texts)))

    def security(self) -> "Security":
        """Return the protection of connections; raise `RequestError` if it does not suffice for a node's address."""
        from foreword.cluster.security import Security, TlsFiles

        files = (self.tls_certificate, self.tls_key, self.tls_authority)
        security = Security.of(self.token_file, TlsFiles(*files) if any(files) else None)
        for address in self.addresses():
            security.check(address, self.insecure)
        return security


def need_frames() -> None:
    """Raise `RequestError` if msgspec, which encodes the messages to nodes, is not installed."""
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"draft nodes need one more package ({error.name}): pip install 'foreword[server]'"
        ) from None


def _read_list(path: Path) -> list[str]:
    """Return the node addresses in a file, which white space separates."""
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the list of draft nodes cannot be read: {error}") from None


def entries(text: str) -> list[str]:
    """Return the entries of a text that commas separate."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def parse_labels(text: str) -> dict[str, str]:
    """Parse `host=a,rack=b,zone=c`, or some of these."""
    labels: dict[str, str] = {}
    for entry in entries(text):
        name, _, value = entry.partition("=")
        if name not in LABELS or not value:
            raise RequestError(f"labels are {', '.join(f'{label}=NAME' for label in LABELS)}, not {entry!r}")
        labels[name] = value
    return labels
