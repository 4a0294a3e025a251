"""Token texts: the vocabulary, the text of a growing answer, and stop strings."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta
from foreword.errors import RequestError
from foreword.models.tokenization.detokenizer import DetokenizerState, IncrementalDetokenizer
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.structured.compiled import GrammarTokens
from foreword.structured.params import Thinking
from foreword.structured.thinking import ThinkingTags

TextState = tuple[str, int, DetokenizerState]
"""An `AnswerText`: held-back text, number of tokens, and the detokenizer's state."""


class AnswerText:
    """Converts committed tokens to text, and holds back text that may become a stop string.

    The stop string that ends an answer does not depend on token boundaries. It is the first that is complete; of
    several that end at the same character, the longest.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, params: SamplingParams) -> None:
        """`params` has the stop strings; one that is complete within `min_tokens` tokens is ignored."""
        self._detokenizer = detokenizer
        self._params, self._stops = params, params.stop_texts
        self._held = ""  # longest suffix of the text that may start a stop string
        self._tokens = 0  # number of tokens added

    def copy(self) -> "AnswerText":
        """Return an independent copy, to try tokens that are not committed."""
        copy = AnswerText(self._detokenizer.copy(), self._params)
        copy._held, copy._tokens = self._held, self._tokens
        return copy

    def state(self) -> TextState:
        """Return a state for `go_back`; cheaper than a copy."""
        return self._held, self._tokens, self._detokenizer.state()

    def go_back(self, state: TextState) -> None:
        """Restore a state that `state` returned."""
        self._held, self._tokens, detokenizer = state
        self._detokenizer.go_back(detokenizer)

    @property
    def has_stop_strings(self) -> bool:
        return bool(self._stops)

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token; return the text that is now final, and the stop string that ends the answer here, or None."""
        piece = self._detokenizer.push(token)
        self._tokens += 1
        if not self._stops or not piece:
            return piece, None
        window = self._held + piece
        match = _find_stop(window, self._stops, len(self._held))
        if match is not None and self._tokens > self._params.min_tokens:
            begin, stop = match
            self._held = ""
            return window[: begin + len(stop) if self._params.include_stop_str_in_output else begin], stop
        self._held = _possible_beginning(window, self._stops)
        return window[: len(window) - len(self._held)], None

    def push_all(self, tokens: Sequence[int]) -> str:
        """Add tokens, only the last of which may end the answer; return the text that is now final."""
        if not self._stops:
            self._tokens += len(tokens)
            return "".join(map(self._detokenizer.push, tokens))
        return "".join([self.push(token)[0] for token in tokens])

    def finish(self) -> str:
        """Return and clear the held-back text, at the end of an answer that no stop string ended."""
        held, self._held = self._held, ""
        return held + self._detokenizer.finish()


def _find_stop(window: str, stops: Sequence[str], checked: int) -> tuple[int, str] | None:
    """Return (start, stop string) of the stop string that is complete first; None if there is none.

    The first `checked` characters contain no complete stop string.
    """
    best: tuple[int, int, str] | None = None  # end, start, stop string
    for stop in stops:
        begin = window.find(stop, max(checked - len(stop) + 1, 0))
        # The smallest end counts; of equal ends, the smallest start: the longest stop string.
        if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
            best = (begin + len(stop), begin, stop)
    return None if best is None else best[1:]


def _possible_beginning(text: str, stops: Sequence[str]) -> str:
    """Return the longest suffix of the text that is a proper prefix of a stop string."""
    longest = max(len(stop) for stop in stops) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-size:]) and len(stop) > size for stop in stops):
            return text[-size:]
    return ""


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return the text of a single token; an incomplete character becomes U+FFFD."""
    return tokenizer.token_bytes(token, skip_special_tokens=False).decode("utf-8", errors="replace")


class TokenTexts:
    """Splits the text of one answer at token boundaries.

    Text that was held back as a possible stop string belongs to the token with which it is released.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer, at_start=False)
        self._begins_with_space = False  # whether the text of the first token begins with a space
        self._token_chars = 0  # characters of all tokens so far
        self._returned_chars = 0  # characters of the deltas before this one

    def pieces(self, delta: AnswerDelta) -> list[str]:
        """Split the answer's next delta: return one text per token; joined, they are the delta's text.

        A delta without tokens yields a single text.
        """
        pieces: list[str] = []
        begin = 0
        for token in delta.token_ids:
            text = self._detokenizer.push(token)
            if self._token_chars == 0:
                self._begins_with_space = text.startswith(" ")
            self._token_chars += len(text)
            if self._begins_with_space and self._returned_chars == 0 and delta.text and delta.text[0] != " ":
                self._token_chars -= 1  # the answer's text lacks the leading space of its first token
                self._begins_with_space = False
            # The token's text ends here in the delta, unless it is held back or was returned with an earlier delta.
            end = min(max(self._token_chars - self._returned_chars, begin), len(delta.text))
            pieces.append(delta.text[begin:end])
            begin = end
        pieces = pieces or [""]
        pieces[-1] += delta.text[begin:]
        self._returned_chars += len(delta.text)
        return pieces

    def split(self, delta: AnswerDelta) -> list[AnswerDelta]:
        """Split the answer's next delta into one per token.

        The first has drafts and the prompt's log-probabilities. The last has finish reason, error and statistics.
        """
        pieces = self.pieces(delta)
        last = len(pieces) - 1
        return [
            replace(
                delta,
                text=piece,
                token_ids=delta.token_ids[index : index + 1],
                logprobs=delta.logprobs[index : index + 1],
                drafts=delta.drafts if index == 0 else (),
                from_draft=int(index < delta.from_draft),
                finish_reason=delta.finish_reason if index == last else None,
                stop_reason=delta.stop_reason if index == last else None,
                error=delta.error if index == last else None,
                stats=delta.stats if index == last else None,
                progress=delta.progress if index == last else None,
                prompt_logprobs=delta.prompt_logprobs if index == 0 else (),
            )
            for index, piece in enumerate(pieces)
        ]


@dataclass(frozen=True)
class Vocabulary:
    """Token ids and their texts; without a tokenizer, answers contain token ids only."""

    size: int  # number of token ids
    end_ids: frozenset[int] = frozenset()  # end-of-sequence tokens
    tokenizer: Tokenizer | None = None

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the token ids of each bad word, once as at the start of a text and once as after a space."""
        if not words:
            return ()
        if self.tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and this engine has none", "bad_words")
        variants = [text for word in words for text in (word, f" {word}")]
        encoded = [tuple(self.tokenizer.encode(text, add_special_tokens=False)) for text in variants]
        return tuple(dict.fromkeys(ids for ids in encoded if ids))  # each once, in order

    def grammar_tokens(self) -> GrammarTokens:
        """Return the bytes that each token adds to a text, for grammars."""
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
        """Return the tags around reasoning, as text and token ids."""
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

    def answer_text(self, params: SamplingParams, prompt: Sequence[int]) -> AnswerText | None:
        """Return the empty text of a new answer to the prompt; None without a tokenizer."""
        if self.tokenizer is None:
            if params.stop_texts:
                raise RequestError("stop texts need a tokenizer, and this engine has none", "stop")
            return None
        at_start = not any(map(self.tokenizer.token_bytes, prompt))
        return AnswerText(IncrementalDetokenizer(self.tokenizer, at_start=at_start), params)
