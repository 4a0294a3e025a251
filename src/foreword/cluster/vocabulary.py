"""Whether token ids mean the same on both sides."""

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256

from foreword.cluster.messages import Vocabulary


@dataclass
class TokenIds:
    """What the ids of one side mean, in order."""

    size: int
    bytes_of: Callable[[int], bytes]  # a token's
    _digests: dict[int, bytes] = field(default_factory=dict)  # of the first so many

    def told(self) -> Vocabulary:
        """As the other side hears it."""
        return Vocabulary(self.size, self._digest(self.size))

    def agrees(self, theirs: Vocabulary) -> bool:
        """One side may have some more at the end; the one that has more is the one that can tell."""
        return theirs.size > self.size or self._digest(theirs.size) == theirs.digest

    def _digest(self, size: int) -> bytes:
        if size not in self._digests:
            digest = sha256()
            for token in range(size):
                meant = self.bytes_of(token)
                digest.update(len(meant).to_bytes(4, "big") + meant)
            self._digests[size] = digest.digest()
        return self._digests[size]
