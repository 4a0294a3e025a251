"""How much of a server's output a check has judged."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.proofs.server.answer import Answer


@dataclass
class Extent:
    """Prompts of a check and the lengths of the answers that it judged."""

    prompts: set[str] = field(default_factory=set)
    most: int = 0  # tokens of the longest answer
    fewest: int | None = None  # tokens of the shortest one; None where the server counts none
    limit: int = 0  # the largest max_tokens

    def add(self, prompt: str, answers: Sequence[Answer]) -> None:
        """Count the answers of one case."""
        self.prompts.add(prompt)
        for answer in answers:
            self.limit = max(self.limit, answer.body["max_tokens"])
            for length in answer.lengths:
                self.most = max(self.most, length)
                self.fewest = length if self.fewest is None else min(self.fewest, length)

    @property
    def tokens(self) -> int:
        """Tokens of the longest answer; the limit where the server counts none."""
        return self.limit if self.fewest is None else self.most

    def __str__(self) -> str:
        if not self.prompts:
            return ""
        if self.fewest is None:
            return f"{len(self.prompts)} × ≤{self.limit}"
        lengths = f"{self.most}" if self.fewest == self.most else f"{self.fewest}–{self.most}"
        return f"{len(self.prompts)} × {lengths}"
