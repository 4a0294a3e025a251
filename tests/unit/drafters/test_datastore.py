"""Datastores: what is found in them, what is refused, and that nothing unfinished is taken for whole."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword.drafters.datastore import build as building
from foreword.drafters.datastore.build import build, sorted_suffixes
from foreword.drafters.datastore.format import HEADER_BYTES, DatastoreError, read_header, verify
from foreword.drafters.datastore.search import Datastore
from foreword.errors import RequestError
from helpers.stores import NumberTokenizer, followers, make_store


def found_in(store: Datastore, end: list[int], shortest: int = 1) -> tuple[int, list[list[int]]]:
    matches = store.longest_matches(np.array(end, np.int64), shortest, 10**6)
    after = store.continuations(matches.starts, 5)
    return matches.length, [[token for token in row if token >= 0] for row in after.tolist()]


@pytest.mark.parametrize(("vocab", "shard"), [(5, 1 << 20), (5, 97), (5, 1), (5, 20), (70_000, 64)])
def test_the_longest_end_is_found_wherever_it_occurs(tmp_path: Path, vocab: int, shard: int):
    """Ids of two and of four bytes, shards of one suffix, matches across their borders but not across texts'."""
    rng = random.Random(vocab + shard)
    ids = range(vocab - 5, vocab)
    texts = [rng.choices(ids, k=rng.randint(1, 90)) for _ in range(4)]
    texts.append([ids[0]] * 40)
    make_store(tmp_path / "store", texts, vocab, shard)
    store = Datastore(tmp_path / "store")
    lengths = set()
    for _ in range(120):
        text = rng.choice(texts)
        start = rng.randrange(len(text))
        end = rng.choices(ids, k=rng.randint(0, 4)) + text[start : start + rng.randint(1, 20)]
        length, after = found_in(store, end)
        expected_length, expected = followers(texts, end, 1)
        assert length == expected_length
        assert Counter(map(tuple, after)) == Counter(map(tuple, expected))
        lengths.add(length)
    assert lengths >= {2, 3, 4, 16}


def test_what_does_not_occur_is_not_found(tmp_path: Path):
    make_store(tmp_path / "store", [[1, 2, 3], [4, 5]], 9)
    store = Datastore(tmp_path / "store")
    assert found_in(store, [7, 8]) == (0, [])
    assert found_in(store, [3, 4]) == (1, [[5]])  # the end of one text and the start of the next are no match
    assert found_in(store, [3], shortest=2) == (0, [])
    assert found_in(store, []) == (0, [])
    assert found_in(store, [5]) == (1, [[]])
    assert found_in(store, [65535]) == (0, [])  # what stands between the texts is no token


def test_of_many_matches_some_are_taken_at_even_distances(tmp_path: Path):
    texts = [[1, 2, number] for number in range(3, 63)]
    make_store(tmp_path / "store", texts, 70, shard_tokens=50)
    store = Datastore(tmp_path / "store")
    matches = store.longest_matches(np.array([1, 2]), 1, 12)
    assert len(matches.starts) == 12
    followed = store.continuations(matches.starts, 1)[:, 0]
    assert len(set(followed.tolist())) == 12
    assert followed.max() - followed.min() > 40


def test_suffixes_are_in_order_however_a_text_repeats_itself():
    rng = np.random.default_rng(2)
    texts = [rng.integers(0, 3, 200), np.zeros(100, np.int64), np.tile([1, 2], 60), np.array([4])]
    texts += [np.array([most, most, 0, most, 3] * 8, np.uint32) for most in (0xFFFF, 0xFFFFFFFF)]
    for tokens in texts:
        padded = [*tokens.tolist(), *[-1] * 16]
        order = sorted_suffixes(tokens, len(tokens), 16)
        keys = [(padded[start : start + 16], start) for start in order.tolist()]
        assert keys == sorted(keys)
        assert sorted(order.tolist()) == list(range(len(tokens)))


def test_one_shard_is_sorted_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What it takes to build does not grow with the texts."""
    sizes = []

    def watched(tokens: Any, count: int, depth: int) -> Any:
        sizes.append(len(tokens))
        return sorted_suffixes(tokens, count, depth)

    monkeypatch.setattr(building, "sorted_suffixes", watched)
    make_store(tmp_path / "store", [list(range(8)) * 200], 9, shard_tokens=100)
    assert len(sizes) == 17
    assert max(sizes) <= 116


def test_texts_are_read_in_pieces_that_end_at_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foreword.drafters.datastore.build._TEXT_BYTES", 256)
    monkeypatch.setattr("foreword.drafters.datastore.build._PIECE_OF_TEXT", 40)
    tokenizer: Any = NumberTokenizer(1000)
    rng = random.Random(1)
    lines = [" ".join(f"w{rng.randrange(1000)}" for _ in range(rng.randint(1, 30))) for _ in range(40)]
    (tmp_path / "text.md").write_text("\n".join(lines), encoding="utf-8")
    header = build([tmp_path / "text.md"], tmp_path / "store", tokenizer, "numbers", lambda *_: None)
    (expected,) = tokenizer.encode_many(["\n".join(lines)])
    assert header.tokens == len(expected) + 1
    store = Datastore(tmp_path / "store")
    assert store.continuations(np.array([0]), len(expected) + 1)[0].tolist() == [*expected, -1]


def test_bare_ids_are_read(tmp_path: Path):
    tokenizer: Any = NumberTokenizer(300)
    np.arange(5, dtype="<u2").tofile(tmp_path / "ids.bin")
    build([tmp_path / "ids.bin"], tmp_path / "store", tokenizer, "numbers", lambda *_: None)
    assert found_in(Datastore(tmp_path / "store"), [1, 2]) == (2, [[3, 4]])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.npy", b"no array", "token ids"),
        ("a.npy", None, "token id 9 is not in the vocabulary"),
        ("a.txt", b"w1 \xff\xfe w2", "not UTF-8"),
        ("a.txt", b"w1 w9", "token id 9 is not in the vocabulary"),
        ("a.txt", b"", "no tokens"),
        ("a.bin", b"", "token ids"),
    ],
)
def test_what_is_no_text_is_refused_and_nothing_is_left(
    tmp_path: Path, name: str, content: bytes | None, words: str
):
    file = tmp_path / name
    np.save(file, np.array([1, 9])) if content is None else file.write_bytes(content)
    tokenizer: Any = NumberTokenizer(9)
    for out in (tmp_path / "store", tmp_path / "new" / "folder" / "store"):
        with pytest.raises(RequestError, match=words):
            build([file], out, tokenizer, "numbers", lambda *_: None)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_build_that_is_interrupted_leaves_nothing(tmp_path: Path):
    (tmp_path / "a.txt").write_text("w1 w2 w3")
    tokenizer: Any = NumberTokenizer(9)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "sorting":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build([tmp_path / "a.txt"], tmp_path / "new" / "store", tokenizer, "numbers", interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_an_output_that_exists_or_cannot_be_written_is_refused(tmp_path: Path):
    (tmp_path / "a.txt").write_text("w1")
    tokenizer: Any = NumberTokenizer(9)
    with pytest.raises(RequestError, match="exists already"):
        build([tmp_path / "a.txt"], tmp_path / "a.txt", tokenizer, "numbers", lambda *_: None)
    with pytest.raises(RequestError, match="cannot be written"):
        build([tmp_path / "a.txt"], tmp_path / "a.txt" / "b", tokenizer, "numbers", lambda *_: None)
    with pytest.raises(RequestError, match=r"missing\.txt cannot be read"):
        build([tmp_path / "missing.txt"], tmp_path / "b" / "c", tokenizer, "numbers", lambda *_: None)
    assert not (tmp_path / "b").exists()
    build([tmp_path / "a.txt"], tmp_path / "b" / "c", tokenizer, "numbers", lambda *_: None)
    assert (tmp_path / "b" / "c").exists()


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    make_store(tmp_path / "store", [list(range(50)) * 3], 60, shard_tokens=40)
    return tmp_path / "store"


def test_a_file_that_ends_early_or_late_is_damaged(whole: Path):
    data = whole.read_bytes()
    for torn in (data[:-1], data[: HEADER_BYTES + 5], data + b"x"):
        whole.write_bytes(torn)
        with pytest.raises(DatastoreError, match="damaged: it has"):
            read_header(whole)


def test_a_file_without_its_header_was_not_finished(whole: Path):
    data = bytearray(whole.read_bytes())
    data[:HEADER_BYTES] = bytes(HEADER_BYTES)
    whole.write_bytes(data)
    with pytest.raises(DatastoreError, match="not finished"):
        Datastore(whole)
    with pytest.raises(DatastoreError, match="cannot be read"):
        Datastore(whole.parent)
    with pytest.raises(DatastoreError, match="No such file"):
        Datastore(whole.parent / "nowhere")


@pytest.mark.parametrize("place", [9, 13, 30])
def test_a_wrong_header_is_damaged(whole: Path, place: int):
    data = bytearray(whole.read_bytes())
    data[place] ^= 0x55
    whole.write_bytes(data)
    with pytest.raises(DatastoreError, match="header is wrong"):
        read_header(whole)


def test_every_byte_is_checked(whole: Path):
    data = whole.read_bytes()
    header = read_header(whole)
    seen = []
    verify(whole, header, lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] == len(data) - HEADER_BYTES
    for place in range(HEADER_BYTES, len(data), 37):
        whole.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(DatastoreError, match="checksum"):
            verify(whole, header)
