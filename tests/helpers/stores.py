"""Small datastores, and what must be found in them by looking at every place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from foreword.drafters.datastore.build import build
from foreword.drafters.datastore.format import Header


class NumberTokenizer:
    """A tokenizer whose tokens are the words w0, w1, ...; all that a datastore asks of one."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [[int(word[1:]) for word in text.split()] for text in texts]

    def token_bytes(self, token: int, *, skip_special_tokens: bool = True) -> bytes:
        return f"w{token} ".encode()


def make_store(
    path: Path, texts: Sequence[Sequence[int]], vocab_size: int, shard_tokens: int = 1 << 20
) -> Header:
    """A datastore of one file for every text."""
    files = []
    for number, text in enumerate(texts):
        files.append(path.parent / f"{path.name}-{number}.npy")
        np.save(files[-1], np.array(text, np.int64))
    tokenizer: Any = NumberTokenizer(vocab_size)
    return build(files, path, tokenizer, "numbers", lambda *_: None, shard_tokens)


def followers(
    texts: Sequence[Sequence[int]], end: Sequence[int], shortest: int
) -> tuple[int, list[list[int]]]:
    """The longest end that occurs, up to 16 tokens, and what follows it wherever it does, by comparing all."""
    for length in range(min(16, len(end)), shortest - 1, -1):
        wanted = list(end[len(end) - length :])
        found = [
            list(text[start + length : start + length + 5])
            for text in map(list, texts)
            for start in range(len(text) - length + 1)
            if text[start : start + length] == wanted
        ]
        if found:
            return length, found
    return 0, []
