"""Which token brought which text."""

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta, DraftShown
from foreword.engine.text import AnswerText, TokenTexts, token_text
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model):
    return open_checkpoint(tiny_model).tokenizer()


def deltas_of(tokenizer, ids: list[int], sizes: list[int], stop: str = "") -> list[AnswerDelta]:
    """An answer in deltas of these sizes, worded as the engine does."""
    words = AnswerText(IncrementalDetokenizer(tokenizer), SamplingParams(stop=(stop,) if stop else ()))
    deltas, done = [], 0
    for size in sizes:
        taken = ids[done : done + size]
        done += size
        text = "".join(words.push(token)[0] for token in taken)
        ended = done >= len(ids)
        deltas.append(
            AnswerDelta(
                "r",
                0,
                text + (words.finish() if ended else ""),
                tuple(taken),
                drafts=(DraftShown((5, 6), (-1, 0), (), size),),
                from_draft=size - 1,
                finish_reason="length" if ended else None,
            )
        )
    return deltas


def test_every_token_has_its_own_text(tokenizer):
    ids = tokenizer.encode("The sky is blue.")
    (delta,) = deltas_of(tokenizer, ids, [len(ids)])
    assert TokenTexts(tokenizer).pieces(delta) == [token_text(tokenizer, token) for token in ids]


@pytest.mark.parametrize("text", ["plain", "ä✓ 👋🏽 ä", "STOPSTO PSTOPX"])
@pytest.mark.parametrize("stop", ["", "STOPY"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_pieces_are_the_text_whatever_was_held_back(tokenizer, text, stop, size):
    ids = tokenizer.encode(text)
    sizes = [size] * (len(ids) // size) + ([len(ids) % size] if len(ids) % size else [])
    deltas = deltas_of(tokenizer, ids, sizes, stop)
    told, split = TokenTexts(tokenizer), TokenTexts(tokenizer)
    for delta in deltas:
        pieces = told.pieces(delta)
        assert "".join(pieces) == delta.text
        assert len(pieces) == len(delta.token_ids)
        units = split.split(delta)
        assert [unit.text for unit in units] == pieces
        assert tuple(token for unit in units for token in unit.token_ids) == delta.token_ids
        assert [unit.from_draft for unit in units] == [1] * (len(units) - 1) + [0]
        assert [unit.drafts for unit in units] == [delta.drafts] + [()] * (len(units) - 1)
        assert [unit.finish_reason for unit in units] == [None] * (len(units) - 1) + [delta.finish_reason]
    assert "".join(delta.text for delta in deltas) == text


def test_text_without_tokens_is_one_piece(tokenizer):
    assert TokenTexts(tokenizer).pieces(AnswerDelta("r", 0, "held", ())) == ["held"]
    assert TokenTexts(tokenizer).pieces(AnswerDelta("r", 0, "", (), finish_reason="abort")) == [""]
