"""Stop texts: which one ends an answer depends on the text alone, not on the tokens that carried it."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.acceptance.params import SamplingParams
from foreword.engine.text import AnswerText
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer
from helpers.byte_pieces import BytePieces

ALPHABET = "abé😀"


def answer(pieces: Sequence[bytes], params: SamplingParams) -> AnswerText:
    """The answer whose i-th token is the i-th piece."""
    return AnswerText(IncrementalDetokenizer(BytePieces(pieces)), params)  # type: ignore[arg-type]


def read(text: AnswerText, tokens: Sequence[int]) -> tuple[list[str], str | None]:
    """The pieces of text that are given out until the answer ends, what is left included, and what ended it."""
    given_out = []
    for token in tokens:
        piece, stop = text.push(token)
        given_out.append(piece)
        if stop is not None:
            return given_out, stop
    return [*given_out, text.finish()], None


def first_stop(text: str, stops: Sequence[str], begin: int = 0) -> tuple[int, str] | None:
    """The definition, character by character: (end, stop text) of the one that is complete first behind `begin`."""
    for end in range(begin + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return end, max(complete, key=len)
    return None


def characters_in(pieces: Sequence[bytes]) -> int:
    """Whole characters in the first bytes of a valid text."""
    return len(b"".join(pieces).decode(errors="ignore"))


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[bytes]]:
    """A text, and its bytes cut anywhere; some tokens are empty."""
    text = draw(st.text(ALPHABET, max_size=24))
    data = text.encode()
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=20)))
    bounds = [0, *cuts, len(data)]
    return text, [data[a:b] for a, b in itertools.pairwise(bounds)]


STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=4).map(tuple)


@settings(max_examples=200, deadline=None)
@given(cut_texts(), STOPS, st.booleans(), st.integers(0, 8))
def test_the_stop_text_that_is_complete_first_ends_the_answer(cut, stops, keep, min_tokens):
    text, pieces = cut
    params = SamplingParams(stop=stops, include_stop_str_in_output=keep, min_tokens=min_tokens)
    given_out, stop = read(answer(pieces, params), range(len(pieces)))
    expected = first_stop(text, stops, begin=characters_in(pieces[:min_tokens]))
    if expected is None:
        assert (stop, "".join(given_out)) == (None, text)
    else:
        end, found = expected
        assert stop == found
        assert "".join(given_out) == text[: end if keep else end - len(found)]


@settings(max_examples=100, deadline=None)
@given(cut_texts(), STOPS)
def test_no_more_is_given_out_than_is_certain_and_no_less(cut, stops):
    text, pieces = cut
    watched, seen = answer(pieces, SamplingParams(stop=stops)), 0
    out = ""
    for token in range(len(pieces)):
        piece, stop = watched.push(token)
        if stop is not None:
            return
        out += piece
        seen = characters_in(pieces[: token + 1])
        held = text[len(out) : seen]
        assert text[:seen] == out + held
        assert held == "" or any(s.startswith(held) and s != held for s in stops), "held back for nothing"
        beginnings = [s[:size] for s in stops for size in range(len(held) + 1, len(s))]
        assert not any(text[:seen].endswith(b) for b in beginnings), "given out too early"


@settings(max_examples=200, deadline=None)
@given(cut_texts(), STOPS, st.data())
def test_a_copy_and_its_original_do_not_notice_each_other(cut, stops, data):
    _, pieces = cut
    everything = SamplingParams(stop=(*stops, "aab"))
    place = data.draw(st.integers(0, len(pieces)))
    original = answer(pieces, everything)
    prefix = []
    for token in range(place):
        piece, stop = original.push(token)
        prefix.append(piece)
        if stop is not None:
            return
    twin = original.copy()
    for token in data.draw(st.lists(st.integers(0, len(pieces) - 1), max_size=6)):
        twin.push(token)
    twin.finish()
    rest, stop = read(original, range(place, len(pieces)))
    whole, same_stop = read(answer(pieces, everything), range(len(pieces)))
    assert ("".join(prefix + rest), stop) == ("".join(whole), same_stop)


@pytest.mark.parametrize(
    ("pieces", "stops", "text", "stop"),
    [
        (["xab", "cd"], ("abcd", "bc"), "xa", "bc"),  # complete first, although the other begins first
        (["xabcd"], ("abcd", "bc"), "xa", "bc"),  # also when one token brings both
        (["xabc"], ("bc", "abc"), "x", "abc"),  # complete at the same character: the longest
        (["xabc"], ("abc", "bc"), "x", "abc"),  # in whatever order they are listed
        (["a", "a", "b"], ("ab",), "a", "ab"),  # what was held back is given out when it is no beginning
        (["abab", "c"], ("babd", "abc"), "ab", "abc"),
        (["one END two END"], ("END",), "one ", "END"),
    ],
)
def test_examples(pieces: list[str], stops: tuple[str, ...], text: str, stop: str):
    given_out, found = read(
        answer([p.encode() for p in pieces], SamplingParams(stop=stops)), range(len(pieces))
    )
    assert ("".join(given_out), found) == (text, stop)


def test_what_a_stop_text_ends_does_not_reappear():
    text = answer([b"ab", b"\xc3"], SamplingParams(stop=("b",)))
    assert text.push(0) == ("a", "b")
    held = answer([b"x", b"ST", b"\xc3"], SamplingParams(stop=("STOP",)))
    assert [held.push(token)[0] for token in range(3)] == ["x", "", ""]
    assert held.finish() == "ST\ufffd", "an unfinished character behind held-back text"


def test_a_stop_text_within_the_first_tokens_does_not_count_but_may_be_part_of_a_later_one():
    early = SamplingParams(stop=("aa",), min_tokens=2)
    given_out, stop = read(answer([b"a", b"a", b"a", b"b"], early), range(4))
    assert ("".join(given_out), stop) == ("a", "aa")
    given_out, stop = read(answer([b"a", b"a", b"b", b"b"], early), range(4))
    assert ("".join(given_out), stop) == ("aabb", None)


def test_a_leading_space_that_the_tokenizer_adds_is_no_part_of_a_stop_text():
    pieces = BytePieces([b" the", b" end"], strips_leading_space=True)
    text = AnswerText(IncrementalDetokenizer(pieces), SamplingParams(stop=(" the", " end")))  # type: ignore[arg-type]
    assert read(text, [0, 1]) == (["the", ""], " end")
