"""Logits of a runner are those of the ids that can be drawn, whatever the embedding's size."""

import pytest
import torch

from foreword.backends.batch import ForwardBatch, ForwardOutput
from foreword.backends.runner import ModelRunner
from foreword.errors import RequestError
from foreword.kv.paged_cache import PagedCache
from foreword.proofs.passes import tiny_decoder
from foreword.speculation.draft import Draft
from foreword.speculation.layout import BatchBuffers, SequenceRows

TOKENS = [1, 2, 3]


def logits_of(
    tokens: list[int], embedding_rows: int, vocab_size: int | None, drawn: torch.Tensor | None = None
) -> torch.Tensor:
    cache = PagedCache(1)
    kv = cache.open()
    cache.reserve(kv, len(tokens))
    rows = SequenceRows(kv, tokens, len(tokens), Draft(), run_logits=len(tokens))
    runner = ModelRunner.allocate(tiny_decoder(embedding_rows, 3), 1, 16, vocab_size=vocab_size)
    batch = BatchBuffers(entries=0).lay_out(cache, [rows], [])
    return runner.forward(batch if drawn is None else batch.after(drawn)).logits


@pytest.mark.parametrize("vocab_size", [11, None])
def test_an_embedding_that_fits_is_left_alone(vocab_size: int | None):
    assert logits_of(TOKENS, 11, vocab_size).shape == (3, 11)


def test_padding_is_cut():
    assert torch.equal(logits_of(TOKENS, 11, 8), logits_of(TOKENS, 11, None)[:, :8])


def test_what_a_smaller_model_does_not_have_is_impossible_and_read_as_something_else():
    logits = logits_of([1, 2, 15], 11, 16)
    assert torch.equal(logits[:, :11], logits_of([1, 2, 10], 11, None))
    assert (logits[:, 11:] == -torch.inf).all()


def test_tokens_that_the_pass_before_has_drawn_are_read_in_their_places():
    drawn = torch.tensor([7, 9, -1])  # of the last one none could be drawn: any token stands for it
    assert torch.equal(logits_of([4, -2, -1], 11, None, drawn), logits_of([4, 9, 7], 11, None))
    assert torch.equal(logits_of([4, -3, 5], 11, None, drawn), logits_of([4, 0, 5], 11, None))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_decoder_reads_draws_that_are_on_its_device_alone(device: str):
    """On the host the tokens are put in their places before the pass."""
    decoder, seen = tiny_decoder(11, 3), []

    def recorded(batch: ForwardBatch, store: object) -> ForwardOutput:
        seen.append(batch)
        return ForwardOutput(torch.zeros(3, 11), {})

    cache = PagedCache(1)
    kv = cache.open()
    cache.reserve(kv, 3)
    batch = BatchBuffers(entries=0).lay_out(cache, [SequenceRows(kv, [4, -2, -1], 3, Draft())], [])
    runner = ModelRunner.allocate(decoder, 1, 16)
    decoder.forward = recorded  # type: ignore[method-assign,assignment]
    runner.forward(batch.after(torch.tensor([7, 9, 8]).to(device)))
    is_known = seen[0].drawn_before is None
    assert is_known == (device == "cpu")
    assert seen[0].token_ids.tolist() == ([4, 9, 7] if is_known else [4, -2, -1])


def test_kv_that_does_not_fit_is_refused_in_one_line(monkeypatch):
    decoder = tiny_decoder(11, 3)

    def full(*given: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 130.00 GiB.")

    monkeypatch.setattr(decoder, "new_kv_store", full)
    with pytest.raises(RequestError, match=r"of 32 tokens needs 0\.0 GiB.* lower the context") as refused:
        ModelRunner.allocate(decoder, 2, 16)
    assert "\n" not in str(refused.value)
