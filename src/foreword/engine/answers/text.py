"""The text of a growing answer, and the stop texts that end it."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.models.tokenization.detokenizer import DetokenizerState, IncrementalDetokenizer


@dataclass(frozen=True)
class StopTexts:
    """What ends an answer by its text."""

    texts: tuple[str, ...] = ()
    keep: bool = False  # leave the stop text at the answer's end
    min_tokens: int = 0  # a stop text that is complete within the first this many tokens does not count


TextState = tuple[str, int, DetokenizerState]


class AnswerText:
    """Turns tokens into text as they are committed; text that may become a stop text is held back.

    Which stop text ends an answer does not depend on how the tokens came or how they cut the text: it is the one
    that is complete first, character by character, and the longest of those that are complete at the same one.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: StopTexts) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""  # the longest end of the text that a stop text may begin with
        self._tokens = 0

    def copy(self) -> "AnswerText":
        """An independent one in the same state, to look ahead with."""
        twin = AnswerText(self._detokenizer.copy(), self._stops)
        twin._held, twin._tokens = self._held, self._tokens
        return twin

    def state(self) -> TextState:
        """What to come back to; cheaper than a copy."""
        return self._held, self._tokens, self._detokenizer.state()

    def go_back(self, state: TextState) -> None:
        """What was pushed since then was not."""
        self._held, self._tokens, detokenizer = state
        self._detokenizer.go_back(detokenizer)

    @property
    def watches(self) -> bool:
        """Whether any text can end the answer."""
        return bool(self._stops.texts)

    def push(self, token: int) -> tuple[str, str | None]:
        """Take a token; return the text that is certain now and the stop text that ends the answer here."""
        piece = self._detokenizer.push(token)
        self._tokens += 1
        if not self.watches or not piece:
            return piece, None
        window = self._held + piece
        found = _first(window, self._stops.texts, len(self._held))
        if found is not None and self._tokens > self._stops.min_tokens:
            begin, stop = found
            self._held = ""
            return window[: begin + len(stop) if self._stops.keep else begin], stop
        self._held = _possible_beginning(window, self._stops.texts)
        return window[: len(window) - len(self._held)], None

    def push_all(self, tokens: Sequence[int]) -> str:
        """Take tokens, of which at most the last one ends the answer; return the text that is certain now."""
        if not self._stops.texts:
            self._tokens += len(tokens)
            return "".join(map(self._detokenizer.push, tokens))
        return "".join([self.push(token)[0] for token in tokens])

    def finish(self) -> str:
        """What was held back, at the end of an answer that no stop text ended."""
        held, self._held = self._held, ""
        return held + self._detokenizer.finish()


def _first(window: str, stops: Sequence[str], known: int) -> tuple[int, str] | None:
    """Where the first complete stop text begins, and which it is; none is complete in the first `known` characters."""
    best: tuple[int, int, str] | None = None
    for stop in stops:
        begin = window.find(stop, max(known - len(stop) + 1, 0))
        if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
            best = (begin + len(stop), begin, stop)
    return None if best is None else best[1:]


def _possible_beginning(text: str, stops: Sequence[str]) -> str:
    """The longest end of the text that is a true beginning of some stop text."""
    longest = max(len(stop) for stop in stops) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) and len(stop) > size for stop in stops):
            return text[-size:]
    return ""
