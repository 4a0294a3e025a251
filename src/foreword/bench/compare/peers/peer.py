"""What an engine under comparison can do."""

from collections.abc import Iterator, Sequence
from typing import Protocol


class Peer(Protocol):
    """A loaded model that answers greedily, one request at a time."""

    def tokens(self, prompt: Sequence[int], count: int) -> Iterator[Sequence[int]]:
        """Exactly `count` tokens after the prompt, in the portions in which they come; nothing is remembered after."""
        ...
