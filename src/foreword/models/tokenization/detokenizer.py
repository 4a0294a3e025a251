"""Token ids to text as they arrive."""

import codecs

from foreword.models.tokenization.tokenizer import Tokenizer

DetokenizerState = tuple[bytes, bool]


class IncrementalDetokenizer:
    """Gives out text as soon as it is certain: whole characters only, however tokens cut them."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, at_start: bool = True
    ) -> None:
        """Not `at_start`: the tokens go on with a text, which keeps the space that they begin with."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._begun = b""  # of a character that is not complete
        self._at_start = at_start

    def push(self, token_id: int) -> str:
        """Take one token; return the text that it completes."""
        piece = self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip_special_tokens)
        if not piece:
            return ""
        if self._at_start:
            self._at_start = False
            if self._tokenizer.strips_leading_space:
                piece = piece.removeprefix(b" ")
        if self._begun:
            piece = self._begun + piece
        text, used = codecs.utf_8_decode(piece, "replace", False)
        self._begun = piece[used:]
        return text

    def finish(self) -> str:
        """What is left at the end: an unfinished character as U+FFFD."""
        begun, self._begun = self._begun, b""
        return begun.decode("utf-8", errors="replace")

    def copy(self) -> "IncrementalDetokenizer":
        """An independent detokenizer in the same state, to look ahead."""
        twin = IncrementalDetokenizer(self._tokenizer, self._skip_special_tokens)
        twin.go_back(self.state())
        return twin

    def state(self) -> DetokenizerState:
        """What to come back to; cheaper than a copy."""
        return self._begun, self._at_start

    def go_back(self, state: DetokenizerState) -> None:
        """What was pushed since then was not."""
        self._begun, self._at_start = state
