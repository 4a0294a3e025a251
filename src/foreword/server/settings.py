"""Server settings and limits."""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

from foreword import __version__
from foreword.acceptance.params import SamplingDefaults
from foreword.cluster.address import NodeAddress, is_loopback
from foreword.errors import RequestError
from foreword.server.model_files import ModelFiles

if TYPE_CHECKING:  # torch is imported after the options are checked
    from foreword.drafters.config import SpeculationConfig


@dataclass(frozen=True)
class Address:
    """The server's address."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free port

    def check(self, has_key: bool, insecure: bool) -> None:
        """Require a key if the address is reachable from other machines, unless `insecure`."""
        if not (has_key or insecure or is_loopback(self.host)):
            raise RequestError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or FOREWORD_API_KEY), "
                "or --insecure to serve without one"
            )

    def allowed_hosts(self, given: Sequence[str]) -> tuple[str, ...] | None:
        """Return the allowed `Host` names; None: any, the default for public addresses."""
        if not (given or is_loopback(self.host)):
            return None
        return tuple(dict.fromkeys((host_name(self.host), *map(host_name, given))))

    def bind(self) -> socket.socket:
        """Return a listening socket; raise `RequestError` if the address is not available."""
        return NodeAddress(self.host, self.port).listen()


def host_name(host: str) -> str:
    """Return a `Host` header without port and brackets, in lower case."""
    name, _, port = host.lower().rpartition(":")
    has_port = name and (port.isdecimal() or not port)
    is_ipv6 = ":" in name and not name.endswith(
        "]"
    )  # an IPv6 address without brackets, and so without a port
    if not has_port or is_ipv6:
        name = host.lower()
    return name.removeprefix("[").removesuffix("]").removesuffix(".")


STREAM_PACINGS = ("burst", "even")
"""How streams send tokens. burst: as they arrive; even: at an even cadence, in padded blocks."""


@dataclass(frozen=True)
class Limits:
    """Limits of one request and of all requests together."""

    body_bytes: int = 2 * 1024 * 1024  # maximum body size
    body_seconds: float = 30.0  # maximum time to receive a body
    header_bytes: int = 16 * 1024  # maximum total size of header lines
    # Maximum time from the first byte of a connection or request to the end of its header.
    header_seconds: float = 10.0
    idle_seconds: float = 30.0  # idle connections are closed
    stall_seconds: float = 60.0  # clients that do not read are disconnected
    connections: int = 1024  # maximum open connections; fewer if file descriptors are limited
    json_depth: int = 64  # maximum nesting depth
    object_keys: int = 1024  # maximum keys of one object, including logit_bias
    prompts: int = 64  # prompts per completion request
    prompt_tokens: int | None = None  # maximum prompt length; None: the model's context
    messages: int = 1024  # messages per conversation
    n: int = 16  # answers per prompt
    logprobs: int = 20  # alternatives per position
    stops: int = 16  # stop texts
    stop_characters: int = 256  # maximum length of a stop text
    bad_words: int = 256  # texts that must not be completed
    listed_tokens: int = 65536  # allowed_token_ids and stop_token_ids
    running: int = 64  # concurrent answers; the engine may run fewer and queue the rest
    queued: int = 64  # waiting answers beyond those; more are refused with 429


@dataclass(frozen=True)
class ServerSettings:
    """One server's settings."""

    model_name: str  # the model's public name; requests without a model name mean this one
    model_files: ModelFiles = field(default_factory=ModelFiles)  # described by Ollama's routes
    api_keys: tuple[str, ...] = ()  # accepted keys; empty: no key needed
    # Keys with access to all routes; only these may change settings for all tenants.
    admin_keys: tuple[str, ...] = ()
    # Allowed `Host` names besides this machine's own; None: any.
    allowed_hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()  # allowed web origins besides the server's own; "*": all
    limits: Limits = field(default_factory=Limits)
    strict_fields: bool = False  # refuse unknown fields instead of ignoring them
    speculation: "SpeculationConfig | None" = None  # default of requests; None: plain decoding
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # default of requests
    # Whether answers and /health report acceptance, which reveals something about the text.
    show_speculation: bool = True
    stream_pacing: str = STREAM_PACINGS[0]  # one of `STREAM_PACINGS`
    access_log: bool = False  # log every request
    allow_switch: bool = False  # enable POST /speculation
    # LoRA adapters to load at the start: name -> folder
    adapters: Mapping[str, str] = field(default_factory=dict)
    allow_adapter_loading: bool = False  # whether clients may load and unload adapters by local path
    policy_file: str | None = None  # path; the engine reads it
    drain_seconds: float = 30.0  # maximum wait for running answers when stopping
    tokenize_threads: int = 2  # threads that tokenize long prompts
    inline_characters: int = 4096  # prompts up to this length are tokenized inline
    tool_call_parser: str = "auto"  # tool-call format; auto: by the chat template
    reasoning_parser: str = "none"  # reasoning format; none: no separation
    fingerprint: str = f"foreword-{__version__}"  # `system_fingerprint` of answers

    @property
    def has_keys(self) -> bool:
        return bool(self.api_keys or self.admin_keys)

    @cached_property
    def methods(self) -> frozenset[str]:
        """Drafters that a request may select: those that need no files and little memory, and the default drafters."""
        from foreword.drafters.registry import drafter_kinds

        free = {name for name, kind in drafter_kinds().items() if kind.traits.is_free}
        return frozenset(free if self.speculation is None else free | set(self.speculation.method))

    @property
    def default_method(self) -> str | None:
        """Name of the default drafter, for display."""
        return None if self.speculation is None else "+".join(self.speculation.method)


def tenant_of(api_key: str) -> str:
    """Return the tenant's name: a hash of the API key, so that the key itself is not passed on."""
    return sha256(b"foreword tenant\0" + api_key.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def is_tenant(name: str) -> bool:
    """Return whether `tenant_of` could return this name."""
    return re.fullmatch("[0-9a-f]{32}", name) is not None
