"""Requests and asks for drafters that are tested alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from foreword.speculation.protocols import Ask

_numbers = count()


@dataclass
class TextRequest:
    """A request that is only its text."""

    tokens: list[int]
    prompt_len: int = 0
    tenant: str = ""
    epoch: int = 0
    request_id: int = field(default_factory=lambda: next(_numbers))


def ask(request: TextRequest | Sequence[int], max_nodes: int = 8, max_depth: int = 64) -> Ask:
    if not isinstance(request, TextRequest):
        request = TextRequest(list(request))
    return Ask(request, max_nodes, max_depth)  # type: ignore[arg-type]
