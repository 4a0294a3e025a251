"""Tokens and their texts: the vocabulary, the text of a growing answer, and the stop strings that end it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.engine.messages import AnswerDelta
from foreword.errors import RequestError
from foreword.models.tokenization.detokenizer import DetokenizerState, IncrementalDetokenizer
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.structured.compiled import GrammarTokens
from foreword.structured.params import Thinking
from foreword.structured.thinking import ThinkingTags


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


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token by itself; half a character is U+FFFD."""
    return tokenizer.token_bytes(token, skip_special_tokens=False).decode("utf-8", errors="replace")


class TokenTexts:
    """Cuts the text of one answer where its tokens meet.

    Text that the engine held back, because it might have become a stop text, belongs to the token that it comes with.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, at_start=False)
        self._begins_with_space = False  # the first token does
        self._spelled = 0  # characters that the tokens so far make
        self._given = 0  # characters that were given out

    def pieces(self, delta: AnswerDelta) -> list[str]:
        """One text per token (one in all if there is text without tokens); together they are the delta's text."""
        pieces: list[str] = []
        begin = 0
        for token in delta.token_ids:
            spelled = self._detokenizer.push(token)
            if self._spelled == 0:
                self._begins_with_space = spelled.startswith(" ")
            self._spelled += len(spelled)
            if self._begins_with_space and self._given == 0 and delta.text and delta.text[0] != " ":
                self._spelled -= 1  # an answer that begins its text has lost it
                self._begins_with_space = False
            end = min(max(self._spelled - self._given, begin), len(delta.text))
            pieces.append(delta.text[begin:end])
            begin = end
        if begin < len(delta.text) or not pieces:
            pieces[-1:] = ["".join(pieces[-1:]) + delta.text[begin:]]
        self._given += len(delta.text)
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


@dataclass(frozen=True)
class Vocabulary:
    """Ids and their texts; without a tokenizer it answers in token ids alone."""

    size: int
    end_ids: frozenset[int] = frozenset()  # the model's own end-of-sequence tokens
    tokenizer: Tokenizer | None = None

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Every bad word as token ids, at the start of a text and after a space."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this engine has none", "bad_words")
        encode = self.tokenizer.encode
        spelled = (encode(t, add_special_tokens=False) for word in words for t in (word, f" {word}"))
        return tuple({tuple(ids): None for ids in spelled if ids})

    def grammar_tokens(self) -> GrammarTokens:
        """The vocabulary as grammars see it: every token by the bytes that it adds to a text."""
        if self.tokenizer is None:
            raise RequestError("structured outputs need a tokenizer, and this engine has none")
        tokenizer = self.tokenizer
        return GrammarTokens(
            [tokenizer.token_bytes(token, skip_special_tokens=False) for token in range(self.size)],
            tuple(sorted(self.end_ids)),
            lambda text: tokenizer.encode(text, add_special_tokens=False),
            sorted(token for token in tokenizer.control_tokens.values() if token < self.size),
            frozenset(tokenizer.control_tokens),
        )

    def thinking_tags(self, thinking: Thinking) -> ThinkingTags:
        """The tags around reasoning, as text and as token ids."""
        if self.tokenizer is None:
            raise RequestError("a thinking budget needs a tokenizer, and this engine has none")
        tokenizer = self.tokenizer
        begin, end = (
            tuple(tokenizer.encode(tag, add_special_tokens=False, parse_special=True))
            for tag in (thinking.begin, thinking.end)
        )
        return ThinkingTags(
            thinking.begin.encode(),
            thinking.end.encode(),
            begin,
            end,
            lambda token: tokenizer.token_bytes(token, skip_special_tokens=False),
            self.size,
            tuple(self.end_ids),
        )

    def answer_text(self, stops: StopTexts, prompt: Sequence[int]) -> AnswerText | None:
        """The text of an answer that begins, as the prompt's goes on."""
        if self.tokenizer is None:
            if stops.texts:
                raise RequestError("stop texts need a tokenizer, and this engine has none", "stop")
            return None
        at_start = not any(map(self.tokenizer.token_bytes, prompt))
        return AnswerText(IncrementalDetokenizer(self.tokenizer, at_start=at_start), stops)
