"""Answers cut into tokens by origin, text made safe for a terminal, and costs added up."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.cli.chat.main import say, show_piece
from foreword.cli.chat.text import PieceReader, Tally, TextPiece, summary_line, visible
from foreword.engine.messages import AnswerDelta, RequestStats
from foreword.models.formats.hf.tokenizer import hf_tokenizer
from foreword.models.tokenization.tokenizer import Tokenizer
from helpers.tiny_models import write_tiny_tokenizer

END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return hf_tokenizer(directory, {})


def byte_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    return tuple(by_bytes[bytes([byte])] for byte in text.encode())


def delta(text: str, tokens: tuple[int, ...], from_draft: int = 0, finish: str | None = None) -> AnswerDelta:
    return AnswerDelta("r", 0, text, tokens, from_draft=from_draft, finish_reason=finish)


def test_the_first_tokens_of_a_delta_are_guesses_and_the_rest_the_targets(tokenizer: Tokenizer):
    reader = PieceReader(tokenizer)
    assert list(reader.read(delta("ab", byte_ids(tokenizer, "ab"), 0))) == [
        TextPiece("a", False),
        TextPiece("b", False),
    ]
    assert list(reader.read(delta("cde", byte_ids(tokenizer, "cde"), 2))) == [
        TextPiece("c", True),
        TextPiece("d", True),
        TextPiece("e", False),
    ]


def test_a_character_in_several_tokens_comes_once_with_the_last(tokenizer: Tokenizer):
    reader = PieceReader(tokenizer)
    ids = byte_ids(tokenizer, "é€")  # 2 and 3 bytes
    assert list(reader.read(delta("é", ids[:3], 3))) == [TextPiece("é", True)]
    assert list(reader.read(delta("€", ids[3:], 1))) == [TextPiece("€", False)]


def test_half_a_character_at_the_end_is_shown_as_such(tokenizer: Tokenizer):
    reader = PieceReader(tokenizer)
    ids = byte_ids(tokenizer, "x€")
    assert list(reader.read(delta("x", ids[:2], 2))) == [TextPiece("x", True)]
    assert list(reader.read(delta("\ufffd", (), 0, "abort"))) == [TextPiece("\ufffd", False)]


def test_the_token_that_ends_an_answer_is_not_shown(tokenizer: Tokenizer):
    (a, b) = byte_ids(tokenizer, "ab")
    assert list(PieceReader(tokenizer).read(delta("a", (a, END), 2, "stop"))) == [TextPiece("a", True)]
    assert list(PieceReader(tokenizer).read(delta("a", (a, b), 0, "stop"))) == [
        TextPiece("a", False)
    ]  # a plain eos
    assert list(PieceReader(tokenizer).read(delta("ab", (a, b), 0, "length"))) == [
        TextPiece("a", False),
        TextPiece("b", False),
    ]


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "[31mred[0m"),
        ("\x1b]0;title\x07x", "]0;titlex"),
        ("a\rb\r\nc", "ab\nc"),
        ("\x9b2Jx\x7f\x00\x08", "2Jx"),
        ("[red]keep[/red] tab\tnew\nline é 漢 🙂", "[red]keep[/red] tab\tnew\nline é 漢 🙂"),
    ],
)
def test_nothing_that_is_said_steers_the_terminal(said: str, shown: str):
    assert visible(said) == shown


@given(st.text())
def test_only_newline_and_tab_are_left_of_the_control_characters(text: str):
    kept = visible(text)
    assert {c for c in kept if unicodedata.category(c) == "Cc"} <= {"\n", "\t"}
    assert visible(kept) == kept


def test_what_is_shown_is_neither_markup_nor_wrapped(capsys: pytest.CaptureFixture[str]):
    show_piece(TextPiece("\x1b[2J[bold]x[/bold] :smile: ", drafted=True))
    show_piece(TextPiece("word " * 60 + "\n", drafted=False))
    assert capsys.readouterr().out == "[2J[bold]x[/bold] :smile: " + "word " * 60 + "\n"
    say("[red]\x1b[2J" + "word " * 60)
    assert capsys.readouterr().err.rstrip() == "[red][2J" + ("word " * 60).rstrip()


def test_tallies_add_up_and_leave_the_prompts_pass_out_of_tokens_per_pass():
    first = Tally.of(
        RequestStats(
            prompt_tokens=10, output_tokens=7, first_tokens=1, decode_seconds=2.0, drafted=6, accepted=4,
            passes=5, first_passes=3, drafted_per_position=(2, 2, 2), accepted_per_position=(2, 1, 1),
        )
    )  # fmt: skip
    assert first.tokens_per_pass == 3.0
    assert first.tokens_per_second == 3.0
    second = Tally.of(
        RequestStats(
            output_tokens=3, first_tokens=1, passes=3, first_passes=1, decode_seconds=1.0,
            drafted_per_position=(1,), accepted_per_position=(0,),
        )
    )  # fmt: skip
    both = first + second
    assert (both.answers, both.output_tokens, both.decode_passes) == (2, 10, 4)
    assert both.drafted_per_position == (3, 2, 2)
    assert both.accepted_per_position == (2, 1, 1)
    assert both.tokens_per_pass == 2.0
    assert Tally() + first == first
    assert summary_line(first, 3.0) == (
        "7 tokens, 3.00 per pass (6 in 2 after the prompt's), 4 of 6 draft tokens accepted, 3.0 tokens/s, "
        "0 of 10 prompt tokens cached"
    )
    alone = Tally.of(RequestStats(prompt_tokens=5, output_tokens=1, first_tokens=1, passes=1, first_passes=1))
    assert summary_line(alone, None) == "1 tokens, - tokens/s, 0 of 5 prompt tokens cached"
    assert Tally().tokens_per_pass is None
