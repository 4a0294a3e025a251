"""What an engine has to know about tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.engine.answers.text import AnswerText, StopTexts
from foreword.errors import RequestError
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.structured.compiled import GrammarTokens


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
            raise RequestError("bad_words need a tokenizer, and this engine has none")
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

    def answer_text(self, stops: StopTexts, prompt: Sequence[int]) -> AnswerText | None:
        """The text of an answer that begins, as the prompt's goes on."""
        if self.tokenizer is None:
            if stops.texts:
                raise RequestError("stop texts need a tokenizer, and this engine has none")
            return None
        at_start = not any(map(self.tokenizer.token_bytes, prompt))
        return AnswerText(IncrementalDetokenizer(self.tokenizer, at_start=at_start), stops)
