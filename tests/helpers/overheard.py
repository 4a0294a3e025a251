"""Listens to what heads say while they guess."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foreword.backends.interface import HeadCall, HeadOutput, MedusaCall
from foreword.speculation.draft import Draft


class OverheardLevels:
    """Every pass of a drafter's head, with the text that it was for."""

    def __init__(self, drafter: Any) -> None:
        self.found: list[tuple[list[int], list[int], torch.Tensor]] = []  # (text, path of guesses, logits)
        self.said: list[tuple[list[int], Draft]] = []
        self.starts: list[int] = []  # the first KV row that each of `found` saw
        self._draft, self._propose = drafter._runner.draft, drafter.propose
        self._text: list[int] = []
        self._rows: list[int] = []  # tokens of the guesses that were read
        drafter._runner.draft, drafter.propose = self.draft, self.propose

    def propose(self, asks: Any) -> Any:
        self._text, self._rows = list(asks[0].request.tokens), []
        drafts = self._propose(asks)
        self.said.append((self._text, drafts[0]))
        return drafts

    def draft(self, call: HeadCall) -> HeadOutput:
        output = self._draft(replace(call, plan=None))  # level by level, so that every level is seen
        wanted, arrays = call.rows, call.rows.arrays
        if wanted.are_head_states:
            self._rows += arrays.token_ids.tolist()
        for place, row in enumerate(arrays.logit_rows):
            mask = int(arrays.ancestor_masks[row, 0])
            path = [token for bit, token in enumerate(self._rows) if mask >> bit & 1]
            self.found.append((self._text, path, output.logits[place].clone()))
            self.starts.append(int(wanted.starts[0]))
        return output


class OverheardPlaces:
    """What a head said of every text, and what was guessed."""

    def __init__(self, drafter: Any) -> None:
        self.found: list[tuple[list[int], Tensor]] = []
        self.said: list[tuple[list[int], Draft]] = []
        self._draft, self._propose = drafter._runner.draft, drafter.propose
        self._text: list[int] = []
        drafter._runner.draft, drafter.propose = self.draft, self.propose

    def propose(self, asks: Any) -> Any:
        self._text = list(asks[0].request.tokens)
        drafts = self._propose(asks)
        self.said.append((self._text, drafts[0]))
        return drafts

    def draft(self, call: HeadCall | MedusaCall) -> Any:
        output = self._draft(replace(call, plan=None))  # so that what is drawn from comes by here
        logits = output.logits[0] if output.logits.ndim == 3 else output.logits
        if len(logits):
            self.found.append((self._text, logits.clone()))
        return output
