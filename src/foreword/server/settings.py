"""The server's settings: where it listens, and every number that refuses something."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

from foreword import __version__
from foreword.acceptance.params import SamplingDefaults
from foreword.cluster.address import cannot_listen, is_loopback
from foreword.errors import RequestError

if TYPE_CHECKING:  # `serve` refuses bad options before it imports torch
    from foreword.drafters.config import SpeculationConfig


@dataclass(frozen=True)
class Address:
    """Where to listen."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: any that is free

    def check(self, has_key: bool, insecure: bool) -> None:
        """Refuse to be reachable from other machines without a key, unless that is what is wanted."""
        if not (has_key or insecure or is_loopback(self.host)):
            raise RequestError(
                f"{self.host} can be reached from other machines: give an API key (--api-key or FOREWORD_API_KEY), "
                "or --insecure if you mean it"
            )

    def allowed_hosts(self, given: Sequence[str]) -> tuple[str, ...] | None:
        """Names that a `Host` header may have; None: any, which is the default beyond this machine."""
        if not (given or is_loopback(self.host)):
            return None
        return tuple(dict.fromkeys((host_name(self.host), *map(host_name, given))))

    def bind(self) -> socket.socket:
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((self.host, self.port))
        except (OSError, OverflowError) as error:
            listening.close()
            raise cannot_listen(f"{self.host} port {self.port}", error) from None
        listening.listen(1024)
        return listening


def host_name(host: str) -> str:
    """A `Host` header without its port, in small letters; an IPv6 address without its brackets."""
    name, _, port = host.lower().rpartition(":")
    if not name or not (port.isdecimal() or not port) or (":" in name and not name.endswith("]")):
        name = host.lower()
    return name.removeprefix("[").removesuffix("]").removesuffix(".")


STREAM_PACINGS = ("burst", "even")
"""Tokens as they come; or at an even cadence, padded."""


@dataclass(frozen=True)
class Limits:
    """What one request, and all of them together, may ask for."""

    body_bytes: int = 2 * 1024 * 1024  # longest request body
    body_seconds: float = 30.0  # a body that takes longer to arrive is given up
    header_bytes: int = 16 * 1024  # all header lines of a request together
    # From a connection's, or a request's, first byte to the end of its header lines.
    header_seconds: float = 10.0
    idle_seconds: float = 30.0  # a connection without a request is closed
    stall_seconds: float = 60.0  # a client that does not read what it is sent is left
    connections: int = 1024  # open at once; fewer where the process may open fewer files
    json_depth: int = 64  # objects and lists inside each other; JSON schemas nest
    object_keys: int = 1024  # keys of one JSON object, token ids of a logit_bias included
    prompts: int = 64  # prompts in one completion request
    prompt_tokens: int | None = None  # longest prompt; None: what the model's context allows
    messages: int = 1024  # messages of one conversation
    n: int = 16  # answers to one prompt
    logprobs: int = 20  # most likely tokens listed per position
    stops: int = 16  # stop texts
    stop_characters: int = 256  # length of a stop text
    bad_words: int = 256  # texts that must not be completed
    listed_tokens: int = 65536  # allowed_token_ids and stop_token_ids
    running: int = 64  # answers that are worked on at once; the engine may take fewer and queue the rest
    queued: int = 64  # answers that wait beyond those; more are refused with 429


@dataclass(frozen=True)
class ServerSettings:
    """One server's settings."""

    model_name: str  # what clients call the model; also the default where a request names none
    api_keys: tuple[str, ...] = ()  # any of these opens the door; none: no door
    admin_keys: tuple[str, ...] = ()  # open every route; only they change the server for all tenants
    # Names in `Host` headers, this machine's own aside; None: any.
    allowed_hosts: tuple[str, ...] | None = None
    cors_origins: tuple[str, ...] = ()  # web pages that may ask, besides the server's own; "*": all
    limits: Limits = field(default_factory=Limits)
    strict_fields: bool = False  # refuse requests with unknown fields instead of ignoring those
    speculation: "SpeculationConfig | None" = None  # of requests that don't ask; None: plain decoding
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)  # of requests that don't say
    show_speculation: bool = True  # acceptance in answers and /health; it tells watchers about the text
    stream_pacing: str = STREAM_PACINGS[0]
    access_log: bool = False  # a line for every request
    allow_switch: bool = False  # POST /speculation turns speculation off and on, and moves roll-outs
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters to begin with: name -> folder
    allow_adapter_loading: bool = False  # clients may load and unload adapters by their paths here
    policy_file: str | None = None  # the operator's rules, which the engine follows
    drain_seconds: float = 30.0  # how long a stopping server waits for running answers
    tokenize_threads: int = 2  # threads that encode long prompts beside the event loop
    inline_characters: int = 4096  # prompts up to this length are encoded at once, without a thread
    tool_call_parser: str = "auto"  # how the model writes calls of tools; auto: as its chat template says
    reasoning_parser: str = "none"  # how the model marks its reasoning; none: it is text
    fingerprint: str = f"foreword-{__version__}"  # `system_fingerprint` of answers

    @property
    def has_keys(self) -> bool:
        """Whether keys distinguish callers."""
        return bool(self.api_keys or self.admin_keys)

    @cached_property
    def methods(self) -> frozenset[str]:
        """The drafters that a request may select: free ones and those of the default."""
        from foreword.drafters.registry import drafter_kinds

        free = {name for name, kind in drafter_kinds().items() if kind.traits.is_free}
        return frozenset(free if self.speculation is None else free | set(self.speculation.method))

    @property
    def default_method(self) -> str | None:
        """Who drafts for requests that don't ask, for people."""
        return None if self.speculation is None else "+".join(self.speculation.method)


def tenant_of(api_key: str) -> str:
    """Whose caches a request may use: a hash, so that the key itself goes no further."""
    return sha256(b"foreword tenant\0" + api_key.encode("utf-8", "surrogateescape")).hexdigest()[:32]
