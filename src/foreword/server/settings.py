"""How the server behaves. Every number that refuses something is here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING

from foreword import __version__
from foreword.acceptance.defaults import SamplingDefaults

if TYPE_CHECKING:  # `serve` refuses bad options before it imports torch
    from foreword.drafters.config import SpeculationConfig

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
    admin_keys: tuple[
        str, ...
    ] = ()  # open every route, and alone those that change the server for all tenants
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
    allow_switch: bool = False  # POST /speculation turns guessing off and on, and moves roll-outs
    adapters: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters to begin with: name -> folder
    allow_adapter_loading: bool = False  # clients may load and unload adapters by their paths here
    policy_file: str | None = None  # the operator's rules, which the engine follows
    drain_seconds: float = 30.0  # how long a stopping server waits for running answers
    tokenize_threads: int = 2  # threads that encode long prompts beside the event loop
    inline_characters: int = 4096  # prompts up to this length are encoded at once, without a thread
    tool_call_parser: str = "auto"  # how the model writes calls of tools; auto: as its chat template says
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
