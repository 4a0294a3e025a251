import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.models.formats.hf.tokenizer import hf_tokenizer
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer
from helpers.nasty_texts import NASTY_TEXTS
from helpers.tiny_models import write_tiny_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return hf_tokenizer(directory, {})


def byte_ids(tokenizer, data):
    """One token per byte."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in data]


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_only_whole_characters_come_out(tokenizer, text):
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(i) for i in byte_ids(tokenizer, text.encode())]
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert detokenizer.finish() == ""


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 365)), skip=st.booleans())
def test_any_ids_give_what_decode_gives(tokenizer, ids, skip):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip)
    text = "".join(detokenizer.push(i) for i in ids) + detokenizer.finish()
    assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=40))
def test_any_bytes_give_what_decode_gives(tokenizer, data):
    detokenizer = IncrementalDetokenizer(tokenizer)
    text = "".join(detokenizer.push(i) for i in byte_ids(tokenizer, data)) + detokenizer.finish()
    assert text == data.decode(errors="replace")


def test_an_unfinished_character_waits_and_ends_as_a_replacement(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    first, second, third, last = byte_ids(tokenizer, "😀".encode())
    assert [detokenizer.push(i) for i in (first, second, third)] == ["", "", ""]
    assert detokenizer.copy().finish() == "\ufffd"
    assert detokenizer.push(last) == "😀"
    assert detokenizer.finish() == ""


def test_a_copy_goes_its_own_way(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = byte_ids(tokenizer, "é".encode())
    detokenizer.push(ids[0])
    ahead = detokenizer.copy()
    assert ahead.push(ids[1]) == "é"
    assert detokenizer.push(*byte_ids(tokenizer, b"x")) == "\ufffdx"


def test_a_control_token_inside_a_character_is_skipped(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    first, second = byte_ids(tokenizer, "é".encode())
    assert [detokenizer.push(i) for i in (first, 2, second)] == ["", "", "é"]
