"""Protection of connections: cluster token, TLS, and when they are required."""

import hmac
import os
import ssl
import stat
from dataclasses import dataclass
from hashlib import sha256

from foreword.cluster.address import NodeAddress
from foreword.errors import RequestError
from foreword.paths import user_path

TOKEN_VARIABLE = "FOREWORD_CLUSTER_TOKEN"
LEAST_TOKEN = 16  # minimum token length, against brute force

TARGET, NODE = b"foreword target", b"foreword node"
"""Roles in proofs, so that one side's proof is not valid for the other."""


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: this side's certificate, its key, and the cluster's certificate authority."""

    certificate: str
    key: str
    authority: str

    def __post_init__(self) -> None:
        for name in (self.certificate, self.key, self.authority):
            if not user_path(name).is_file():
                raise RequestError(
                    f"TLS needs a certificate, its key and the cluster's authority; no file {name!r}"
                )

    def context(self, *, is_node: bool) -> ssl.SSLContext:
        """Return a TLS context that requires a certificate of the cluster's authority, for any host name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_node else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_cert_chain(user_path(self.certificate), user_path(self.key))
            context.load_verify_locations(user_path(self.authority))
        except (OSError, ssl.SSLError) as error:
            raise RequestError(f"TLS files cannot be used: {error}") from None
        return context


@dataclass(frozen=True)
class Security:
    """Protection of a connection."""

    token: bytes = b""  # empty: no token
    tls: TlsFiles | None = None

    @staticmethod
    def of(token_file: str = "", tls: TlsFiles | None = None) -> "Security":
        """Return the protection with the token in the file, or without a file in the environment."""
        return Security(_token(token_file), tls)

    def check(self, address: NodeAddress, insecure: bool = False) -> None:
        """Raise `RequestError` if other machines can reach the address without token and TLS, unless `insecure`."""
        if insecure or address.is_local:
            return
        missing = []
        if not self.token:
            missing.append(f"a cluster token ({TOKEN_VARIABLE} or a file)")
        if not self.tls:
            missing.append("TLS files")
        if missing:
            raise RequestError(
                f"{address} can be reached from other machines, and prompts travel there: give "
                f"{' and '.join(missing)}, or the insecure option if the network is yours alone"
            )

    def proof(self, role: bytes, their_nonce: bytes, our_nonce: bytes) -> bytes:
        """Return the proof that this side, which has the given role, knows the token."""
        return hmac.digest(self.token, role + their_nonce + our_nonce, sha256)

    def is_proof(self, proof: bytes, role: bytes, their_nonce: bytes, our_nonce: bytes) -> bool:
        """Return whether the peer, which has the given role, has proved that it knows the token."""
        return hmac.compare_digest(proof, self.proof(role, our_nonce, their_nonce))


def tenant_hash(tenant: str, token: bytes) -> bytes:
    """Return a hash that identifies a tenant to nodes without revealing its name; empty for no tenant."""
    return hmac.digest(token, tenant.encode("utf-8", "surrogatepass"), sha256)[:16] if tenant else b""


def _token(token_file: str) -> bytes:
    """Return the cluster token from the file or, without a file, from the environment; empty: none is set."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip().encode()
    if token_file:
        path = user_path(token_file)
        try:
            mode = path.stat().st_mode
            token = path.read_bytes().strip()
        except OSError as error:
            raise RequestError(f"the cluster token cannot be read: {error}") from None
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise RequestError(f"{token_file} can be read by others: chmod 600 {token_file}")
    if (token or token_file) and len(token) < LEAST_TOKEN:
        source = token_file or TOKEN_VARIABLE
        raise RequestError(f"the cluster token in {source} must have at least {LEAST_TOKEN} characters")
    return token
