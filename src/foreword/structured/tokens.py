"""What grammars have to know of a model's tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer


_IN_A_TEXT = r'[^"\\\x00-\x1F\x7F]'
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_IN_A_TEXT}{{1,{most}}}" for most in (1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 30)),
    f"{_IN_A_TEXT}+",
]
"""Tokens whose masks llguidance works out once and for all: its list, with more steps for texts of a bounded length.
Masks inside those then take a fifth less time."""


@dataclass(frozen=True)
class GrammarTokens:
    """The vocabulary as bytes. A grammar sees exactly what an answer's text is made of."""

    pieces: Sequence[bytes]  # [vocabulary], what each id adds to the text; of control tokens their names
    end_ids: tuple[int, ...]  # any of them ends an answer
    encode: Callable[[str], list[int]]  # a text as the model's own tokenizer splits it
    control_ids: Sequence[int] = ()  # tokens that no text spells
    control_names: frozenset[str] = field(default_factory=frozenset)

    @property
    def size(self) -> int:
        return len(self.pieces)

    def for_llguidance(self) -> "LLTokenizer":
        """As llguidance wants it; takes about a microsecond for every token."""
        from llguidance import LLTokenizer, TokenizerWrapper

        return LLTokenizer(TokenizerWrapper(_Wrapped(self)), n_vocab=self.size, slices=_SLICES)


class _Wrapped:
    """The names that llguidance looks for."""

    bos_token_id = None

    def __init__(self, tokens: GrammarTokens) -> None:
        self.eos_token_id = tokens.end_ids[0]
        self.tokens = list(tokens.pieces)
        self.special_token_ids = sorted({*tokens.control_ids, *tokens.end_ids})
        self._encode = tokens.encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.decode("utf-8") if isinstance(text, bytes) else text)
