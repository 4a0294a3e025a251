"""Options of draft nodes, and the protection of their connections."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foreword.cli.options.common import split_list
from foreword.cli.options.grouped import flag, late, option
from foreword.errors import RequestError

if TYPE_CHECKING:
    from foreword.cluster.security import Security
    from foreword.drafters.config import SpeculationConfig

DRAFT_TOKENS = 5  # default number of draft tokens requested from nodes per pass

TokenFileOption = Annotated[
    Path | None, typer.Option(help="Cluster token's file. Default: FOREWORD_CLUSTER_TOKEN.")
]
TlsOption = Annotated[str | None, typer.Option(metavar="CERT,KEY,CA", help="PEM files of the cluster.")]


def labels_option() -> Any:  # noqa: ANN401
    """Return the field of the option for a process's location."""
    return option("", "Location of this process; near nodes are preferred.", metavar="host=A,rack=B,zone=C")


def tls_files(text: str | None) -> tuple[str, str, str] | None:
    """Return the paths of certificate, key and authority from `CERT,KEY,CA`."""
    if text is None:
        return None
    files = split_list(text)
    if len(files) != 3 or text.count(",") != 2:
        raise RequestError("TLS takes three files with commas: certificate, key, authority")
    return files[0], files[1], files[2]


@dataclass(frozen=True, kw_only=True)
class SecurityOptions:
    """Protection of connections between targets and nodes."""

    token_file: TokenFileOption = late(None, 1)
    tls: TlsOption = late(None, 1)

    def security(self) -> "Security":
        from foreword.cluster.security import Security, TlsFiles

        files = tls_files(self.tls)
        return Security.of(str(self.token_file or ""), None if files is None else TlsFiles(*files))


@dataclass(frozen=True)
class NodeOptions:
    """Draft nodes of a target, and their protection."""

    drafters: str | None = option(
        None,
        "Draft nodes (foreword draft-node), or @FILE with one per line, reread periodically; the "
        "drafter of --speculation is the fallback.",
        metavar="HOST:PORT,...",
    )
    drafters_insecure: bool = flag("Connect to nodes on other machines without token and TLS.")
    drafters_labels: str = labels_option()
    drafters_token_file: TokenFileOption = None
    drafters_tls: TlsOption = None
    local_tenants: str = option("", "Tenants whose texts are not sent to draft nodes, such as a*,b?.")

    def settings(self) -> dict[str, Any]:
        """Return the options as keys of a speculation config; empty without draft nodes."""
        from foreword.cluster.settings import RemoteConfig

        files = tls_files(self.drafters_tls)
        if self.drafters is None:
            if self.drafters_labels or self.drafters_token_file or files or self.local_tenants:
                raise RequestError("--drafters-..., --local-tenants: give --drafters too, or leave them out")
            return {}
        keys: dict[str, Any] = {
            "drafters": self.drafters,
            "labels": self.drafters_labels,
            "local_tenants": self.local_tenants,
            "insecure": self.drafters_insecure,
        }
        if self.drafters_token_file is not None:
            keys["token_file"] = str(self.drafters_token_file)
        if files is not None:
            keys |= dict(zip(("tls_certificate", "tls_key", "tls_authority"), files, strict=True))
        RemoteConfig(**keys).security()  # refuses unprotected nodes before a model is loaded
        return keys


def with_nodes(config: "SpeculationConfig | None", nodes: dict[str, Any]) -> "SpeculationConfig | None":
    """Return a configuration that prefers the nodes of `NodeOptions.settings`, with the local drafter as fallback.

    Raise `RequestError` if the connections to the nodes would be unprotected.
    """
    from foreword.drafters.config import SpeculationConfig
    from foreword.speculation.drafting import DraftSource

    if not nodes:
        if config is not None:
            for name in config.methods_of(DraftSource.REMOTE):
                config.settings_of(name).security()
        return config
    if config is None:
        return SpeculationConfig.parse({"method": "remote", "num_speculative_tokens": DRAFT_TOKENS, **nodes})
    if config.methods_of(DraftSource.REMOTE):
        raise RequestError("--drafters and a --speculation by remote exclude each other; give one")
    return SpeculationConfig.parse({**config.as_mapping(), "method": ["remote", *config.method], **nodes})
