"""Which part of an answer's text each of its tokens brought."""

from dataclasses import replace

from foreword.engine.messages import AnswerDelta
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer
from foreword.models.tokenization.tokenizer import Tokenizer


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself; half a character is U+FFFD."""
    return tokenizer.token_bytes(token, skip_special_tokens=False).decode("utf-8", errors="replace")


class TokenTexts:
    """Cuts the text of one answer where its tokens meet.

    Text that the engine held back, because it might have become a stop text, belongs to the token it is told with.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, at_start=False)
        self._begins_with_space = False  # the first token does
        self._spelled = 0  # characters that the tokens so far make
        self._told = 0  # characters that were given out

    def pieces(self, delta: AnswerDelta) -> list[str]:
        """One text per token (one in all if there is text without tokens); together they are the delta's text."""
        pieces: list[str] = []
        begin = 0
        for token in delta.token_ids:
            spelled = self._detokenizer.push(token)
            if self._spelled == 0:
                self._begins_with_space = spelled.startswith(" ")
            self._spelled += len(spelled)
            if self._begins_with_space and self._told == 0 and delta.text and delta.text[0] != " ":
                self._spelled -= 1  # an answer that begins its text has lost it
                self._begins_with_space = False
            end = min(max(self._spelled - self._told, begin), len(delta.text))
            pieces.append(delta.text[begin:end])
            begin = end
        if begin < len(delta.text) or not pieces:
            pieces[-1:] = ["".join(pieces[-1:]) + delta.text[begin:]]
        self._told += len(delta.text)
        return pieces

    def split(self, delta: AnswerDelta) -> list[AnswerDelta]:
        """The delta as one delta per token. The first has what came before, the last has the end."""
        pieces = self.pieces(delta)
        last = len(pieces) - 1
        return [
            replace(
                delta,
                text=piece,
                token_ids=delta.token_ids[place : place + 1],
                logprobs=delta.logprobs[place : place + 1],
                drafts=delta.drafts if place == 0 else (),
                from_draft=int(place < delta.from_draft),
                finish_reason=delta.finish_reason if place == last else None,
                stop_reason=delta.stop_reason if place == last else None,
                error=delta.error if place == last else None,
                stats=delta.stats if place == last else None,
                progress=delta.progress if place == last else None,
                prompt_logprobs=delta.prompt_logprobs if place == 0 else (),
            )
            for place, piece in enumerate(pieces)
        ]
