"""File format of a datastore: a header, token ids, and sorted suffix positions per shard.

Ids are big-endian, so that byte order equals token order. Each shard has its own suffixes, sorted by their first
DEPTH tokens. Suffixes at a shard's end extend into the next shard, so that no match is lost. The header is written
last: an incomplete file has none.
"""

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

from foreword.errors import ForewordError
from foreword.models.tokenization.tokenizer import Tokenizer
from foreword.progress import Progress

MAGIC = b"FWSTORE1"
HEADER_BYTES = 1 << 16  # size of the header section in bytes; the ids follow
DEPTH = 16  # tokens by which suffixes are sorted: the longest text that can be looked up

PADDING = DEPTH * 4
"""Separator bytes after the ids, DEPTH ids of up to 4 bytes: the last suffixes can be compared like the others."""

LISTED_SOURCES = 16  # maximum source files named in the header
_CHUNK = 1 << 22  # bytes read at once


class DatastoreError(ForewordError):
    """A datastore cannot be read, or belongs to another model."""


@dataclass(frozen=True)
class Header:
    """Description of a datastore."""

    tokens: int  # ids including separators
    id_bytes: int  # 2 or 4
    shard_tokens: int  # ids per shard except the last
    depth: int  # tokens by which suffixes are sorted
    vocab_size: int
    tokenizer: str  # fingerprint of the vocabulary
    model: str  # name of the tokenizer's model
    sources: tuple[str, ...]  # names of the first source files
    files: int  # number of source files
    ids_crc: int  # CRC-32 of the ids and their padding
    order_crc: int  # CRC-32 of the positions

    @property
    def separator(self) -> int:
        """The id between texts, which no tokenizer uses."""
        return separator(self.id_bytes)

    @property
    def order_start(self) -> int:
        """Offset of the positions: after ids and padding, a multiple of 8."""
        return -(-(HEADER_BYTES + self.tokens * self.id_bytes + PADDING) // 8) * 8

    @property
    def file_bytes(self) -> int:
        return self.order_start + self.tokens * 4

    @property
    def shards(self) -> int:
        return -(-self.tokens // self.shard_tokens)


def separator(id_bytes: int) -> int:
    """Return the largest number that an id can hold."""
    return int((1 << (8 * id_bytes)) - 1)


def id_bytes_for(vocab_size: int) -> int:
    """Return the bytes per id, with the largest number left for the separator."""
    return 2 if vocab_size <= separator(2) else 4


def fingerprint(tokenizer: Tokenizer) -> str:
    """Return a hash that is equal for tokenizers whose ids mean the same bytes."""
    digest = hashlib.sha256()
    for token in range(tokenizer.vocab_size):
        piece = tokenizer.token_bytes(token, skip_special_tokens=False)
        digest.update(len(piece).to_bytes(4, "little") + piece)
    return digest.hexdigest()


def write_header(file: BinaryIO, header: Header) -> None:
    """Write the header, after the rest of the file is on disk."""
    text = json.dumps(asdict(header)).encode()
    file.flush()
    os.fsync(file.fileno())
    file.seek(0)
    file.write(MAGIC + len(text).to_bytes(4, "little") + zlib.crc32(text).to_bytes(4, "little") + text)
    file.flush()
    os.fsync(file.fileno())


def read_header(path: Path) -> Header:
    """Read the header and check the file's size."""
    try:
        with path.open("rb") as file:
            start = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DatastoreError(f"datastore {path} cannot be read: {error.strerror or error}") from None
    if not start.startswith(MAGIC):
        raise DatastoreError(
            f"{path} is not a datastore, or was not finished; make one: foreword datastore build"
        )
    length = int.from_bytes(start[8:12], "little")
    text = start[16 : 16 + length]
    if zlib.crc32(text) != int.from_bytes(start[12:16], "little"):
        raise _damaged(path, "its header is wrong")
    header = _parse(text, path)
    if size != header.file_bytes:
        raise _damaged(path, f"it has {size} bytes instead of {header.file_bytes}")
    return header


def _parse(text: bytes, path: Path) -> Header:
    try:
        values = json.loads(text)
        header = Header(**{**values, "sources": tuple(values["sources"])})
    except (ValueError, TypeError, KeyError):
        raise _damaged(path, "its header is of another version") from None
    numbers = [getattr(header, field.name) for field in fields(Header) if field.type is int]
    is_sane = all(isinstance(number, int) and number >= 0 for number in numbers)
    if not is_sane or header.id_bytes not in (2, 4) or header.depth != DEPTH or header.shard_tokens < 1:
        raise _damaged(path, "its header is of another version")
    return header


def verify(path: Path, header: Header, progress: Progress | None = None) -> None:
    """Raise `DatastoreError` if a checksum of the file is wrong; reads the whole file."""
    with path.open("rb") as file:
        file.seek(HEADER_BYTES)
        done = 0  # bytes read
        sections = (header.order_start - HEADER_BYTES, header.ids_crc), (header.tokens * 4, header.order_crc)
        for length, expected in sections:
            crc, end = 0, done + length
            while done < end and (chunk := file.read(min(end - done, _CHUNK))):
                crc = zlib.crc32(chunk, crc)
                done += len(chunk)
                if progress is not None:
                    progress(done, header.file_bytes - HEADER_BYTES)
            if crc != expected:
                raise _damaged(path, "its checksum is wrong")


def _damaged(path: Path, why: str) -> DatastoreError:
    return DatastoreError(f"datastore {path} is damaged: {why}; build it again")
