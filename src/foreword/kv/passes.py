"""How many passes are under way for a sequence, and whether it is known how they end."""

from collections.abc import Sequence

from foreword.kv.sequence import KvSequence

MOST_PASSES = 2
"""Passes that are under way for one sequence."""


class PassesUnderWay:
    """What a cache knows of them; all of it stands in the sequences themselves."""

    def hold_back(self, sequences: Sequence[KvSequence]) -> None:
        """No pass may begin for these until `end_pass`, unless `foresee` says how this one will end."""
        for sequence in sequences:
            sequence.passes += 1
            sequence.is_foreseen = False

    def foresee(self, sequence: KvSequence, rows: int) -> None:
        """The pass that was begun last makes its first `rows` rows final and no others, whatever it finds out."""
        sequence.ahead += rows
        sequence.is_foreseen = True

    def end_pass(self, sequences: Sequence[KvSequence]) -> None:
        """The oldest pass of each is done, or could not be launched."""
        for sequence in sequences:
            sequence.passes -= 1
