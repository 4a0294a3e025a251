"""A pretend tokenizer whose tokens are pieces of bytes, some of them parts of a character."""

from collections.abc import Iterable, Sequence

EOS, OTHER_EOS, CONTROL = 0, 1, 2
"""Control tokens: they have no text."""

PIECES = (
    *(b"", b"", b""),
    *(b"a", b"b", b"c", b"ab", b"ba", b"aa", b"abc", b"bca", b"cab", b"ccc", b" ", b"\n"),
    *(
        "é".encode()[:1],
        "é".encode()[1:],
        "é".encode(),
        "a😀".encode()[:3],
        "😀b".encode()[2:],
        "😀".encode(),
    ),
    *(b"x", b"xa", b"bx", b"acb", b"aab", b"bb", b"ca", b"bc", b"xx", b"c a", b"b\n"),
)


class BytePieces:
    """What a detokenizer and an answer's reader need of a tokenizer."""

    chat_template = None

    def __init__(self, pieces: Sequence[bytes] = PIECES, *, strips_leading_space: bool = False) -> None:
        self.pieces = tuple(pieces)
        self.strips_leading_space = strips_leading_space

    @property
    def vocab_size(self) -> int:
        return len(self.pieces)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        return self.pieces[token_id]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [self.pieces.index(bytes([byte])) for byte in text.encode()]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        joined = b"".join(self.pieces[i] for i in ids)
        if self.strips_leading_space:
            joined = joined.removeprefix(b" ")
        return joined.decode(errors="replace")
