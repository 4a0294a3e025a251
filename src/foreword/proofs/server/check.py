"""One claim and how it is examined."""

from typing import ClassVar, Protocol

from foreword.proofs.server.ground import Ground
from foreword.proofs.server.verdict import Verdict


class Check(Protocol):
    """A claim that a server makes to its users."""

    name: ClassVar[str]
    claim: ClassVar[str]  # a sentence
    rests_on: ClassVar[tuple[str, ...]]  # names of claims without which its outcome would say nothing

    def cost(self, ground: Ground) -> int:
        """Requests at most, unless the claim is refuted: then a few more, to find a small one that shows it."""
        ...

    async def examine(self, ground: Ground) -> Verdict:
        """Ask and judge. `Refused`: the server has not got what it takes."""
        ...
