"""What a user says about draft nodes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from foreword.cluster.address import NodeAddress
from foreword.cluster.assignment import LABELS
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.cluster.security import Security


@dataclass(frozen=True)
class RemoteConfig:
    """Where the nodes are, how they are talked to, and for whom they are not."""

    # Addresses of draft nodes, with commas: host:port or unix:/path. Or @FILE with one in a line, which is read again.
    drafters: str
    shadow: int = 8  # drafts of a node that joins which are compared with the text before any is verified
    labels: str = ""  # where this target is, so that near nodes come first: host=a,rack=b,zone=c
    local_tenants: str = ""  # tenants whose texts stay on this machine, with commas, * and ?
    token_file: str = ""  # with the cluster's token; empty: FOREWORD_CLUSTER_TOKEN
    tls_certificate: str = ""  # PEM files: this target's certificate, its key, the cluster's authority
    tls_key: str = ""
    tls_authority: str = ""
    insecure: bool = False  # reach nodes on other machines without token and TLS

    def __post_init__(self) -> None:
        if not self.addresses() and not self.is_listed:
            raise RequestError("speculation: drafters must name at least one draft node")
        if self.shadow < 0:
            raise RequestError(f"speculation: shadow must be 0 or more, not {self.shadow}")
        parse_labels(self.labels)

    @property
    def is_listed(self) -> bool:
        """Whether a file has the addresses, which may be others later."""
        return self.drafters.startswith("@")

    def addresses(self) -> list[NodeAddress]:
        """Each node once."""
        given = _listed(Path(self.drafters[1:])) if self.is_listed else entries(self.drafters)
        return list(dict.fromkeys(map(NodeAddress.parse, given)))

    def security(self) -> "Security":
        """What connections are protected by; raises `RequestError` where a node may only be reached with more."""
        from foreword.cluster.security import Security, TlsFiles

        files = (self.tls_certificate, self.tls_key, self.tls_authority)
        security = Security.of(self.token_file, TlsFiles(*files) if any(files) else None)
        for address in self.addresses():
            security.check(address, self.insecure)
        return security


def need_frames() -> None:
    """Raises `RequestError` where the package is missing that frames are made with."""
    try:
        import msgspec  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"draft nodes need one more package ({error.name}): pip install 'foreword[server]'"
        ) from None


def _listed(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the list of draft nodes cannot be read: {error}") from None


def entries(text: str) -> list[str]:
    """What stands between commas."""
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def parse_labels(text: str) -> dict[str, str]:
    """`host=a,rack=b,zone=c`, or some of them."""
    found: dict[str, str] = {}
    for entry in entries(text):
        name, _, value = entry.partition("=")
        if name not in LABELS or not value:
            raise RequestError(f"labels are {', '.join(f'{label}=NAME' for label in LABELS)}, not {entry!r}")
        found[name] = value
    return found
