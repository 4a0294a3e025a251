"""Converts a stream of token ids to text."""

import codecs

from foreword.models.tokenization.tokenizer import Tokenizer

DetokenizerState = tuple[bytes, bool]  # (bytes of an incomplete character, whether no text was returned yet)


class IncrementalDetokenizer:
    """Converts tokens to text, and returns each character as soon as it is complete: tokens may split characters."""

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, *, at_start: bool = True
    ) -> None:
        """Create a converter. With `at_start` False, the tokens continue a text, so no leading space is stripped."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._partial = b""  # first bytes of an incomplete character
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
        if self._partial:
            piece = self._partial + piece
        text, used = codecs.utf_8_decode(piece, "replace", False)
        self._partial = piece[used:]
        return text

    def finish(self) -> str:
        """Return the rest of the text; an incomplete character becomes U+FFFD."""
        partial, self._partial = self._partial, b""
        return partial.decode("utf-8", errors="replace")

    def copy(self) -> "IncrementalDetokenizer":
        """Return an independent copy, for tokens that may be discarded."""
        twin = IncrementalDetokenizer(self._tokenizer, self._skip_special_tokens)
        twin.go_back(self.state())
        return twin

    def state(self) -> DetokenizerState:
        """Return the state for `go_back`, which costs less than a copy."""
        return self._partial, self._at_start

    def go_back(self, state: DetokenizerState) -> None:
        """Restore an earlier state."""
        self._partial, self._at_start = state
