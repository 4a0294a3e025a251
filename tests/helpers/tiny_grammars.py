"""Grammars over a vocabulary of a few pieces of text, some of which can be spelled in several ways."""

from collections.abc import Sequence

import numpy as np

from foreword.structured.compiled import GrammarTokens
from foreword.structured.compiler import Grammars
from foreword.structured.params import StructuredOutputs
from foreword.structured.state import GrammarState, unpacked

END, OTHER_END, CONTROL = 0, 1, 2
PIECES = (
    *(b"<end>", b"<other end>", b"<control>"),
    *(b"a", b"b", b"c", b"ab", b"ba", b"abc", b"cc", b" ", b"\n", b"x", b"1", b"23"),
    *(b"{", b"}", b'"', b'{"', b'"}', b'":', b'": ', b'": "', b", ", b":", b",", b"[", b"]"),
    *("é".encode()[:1], "é".encode()[1:], "é".encode()),
)
PARTS = {part.decode(): number for number, part in enumerate(PIECES[3:28], start=3)}


def encode(text: str) -> list[int]:
    """The longest pieces first, as a tokenizer might."""
    ids, rest = [], text.encode()
    while rest:
        found = max(
            (i for i in range(3, len(PIECES)) if rest.startswith(PIECES[i])), key=lambda i: len(PIECES[i])
        )
        ids.append(found)
        rest = rest[len(PIECES[found]) :]
    return ids


def token_table() -> GrammarTokens:
    return GrammarTokens(
        PIECES, (END, OTHER_END), encode, (END, OTHER_END, CONTROL), frozenset({"<control>"})
    )


def grammars(**options) -> Grammars:
    return Grammars(token_table, **options)


def allowed(state: GrammarState, ahead: Sequence[int] = ()) -> list[bytes]:
    """What may follow, as pieces of text."""
    chain = state.masks(list(ahead), range(-1, len(ahead) - 1))
    return [PIECES[i] for i in np.flatnonzero(unpacked(chain, len(PIECES))[-1])]


def fresh(kept: Grammars, wanted: StructuredOutputs, tokens: Sequence[int]) -> GrammarState:
    """A state that has read these from the start, one by one, and has never looked ahead."""
    state = kept.begin(wanted)
    for token in tokens:
        state.commit([token])
    return state
