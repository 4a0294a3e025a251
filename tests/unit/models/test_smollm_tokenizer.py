import re
import sys

import gguf
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.sources.builtin import BUILTIN_MODELS
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer
from foreword.models.tokenization.token_pieces import byte_alphabet
from helpers.naive_bpe import merge_by_rank
from helpers.nasty_texts import NASTY_TEXTS

pytestmark = pytest.mark.model

MODEL = BUILTIN_MODELS[0].path
UNKNOWN_CHARACTERS = (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)
"""SmolLM2's vocabulary has no tokens for these, and its tokenizer drops them."""


@pytest.fixture(scope="module")
def stored():
    """Tokens, token types and merges as the gguf package reads them."""
    if not MODEL.exists():
        pytest.skip("run `foreword pull smollm2-135m` first")
    fields = gguf.GGUFReader(MODEL).fields
    return [fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "merges")]


@pytest.fixture(scope="module")
def tokenizer(stored):
    return open_checkpoint(MODEL).tokenizer()


@pytest.fixture(scope="module")
def reference(stored):
    tokens, types, merges = stored
    vocabulary = {token: number for number, token in enumerate(tokens)}
    built = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(merge.split(" ")) for merge in merges]))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([token for token, kind in zip(tokens, types, strict=True) if kind == 3])
    return built


def test_what_the_file_says(tokenizer):
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == {0, 2}, "the end of a text and of a turn"
    assert tokenizer.bos_id == 1


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_nasty_texts(tokenizer, reference, text):
    reference.encode_special_tokens = True
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    kept = text.translate(dict.fromkeys(UNKNOWN_CHARACTERS))
    assert tokenizer.decode(ids) == kept
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == kept


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("a  2", ["a", "ĠĠ", "2"]),
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("The sky is blue.", ["The", "Ġsky", "Ġis", "Ġblue", "."]),
    ],
)
def test_known_pieces(tokenizer, stored, text, pieces):
    assert [stored[0][i] for i in tokenizer.encode(text)] == pieces


def test_merging_equals_the_naive_algorithm(tokenizer, stored):
    tokens, _, merges = stored
    ids = {token: number for number, token in enumerate(tokens)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    letters = {byte: char for char, byte in byte_alphabet().items()}
    # For letters and single spaces the cuts are plain: before each space.
    text = "Speculative decoding lets a cheap drafter guess while the target model judges every guess"
    expected = []
    for word in re.findall(r" ?\S+", text):
        symbols = [letters[byte] for byte in word.encode()]
        expected += [ids[piece] for piece in merge_by_rank(symbols, ranks)]
    assert tokenizer.encode(text) == expected


def test_chat_is_the_rendered_text(tokenizer, reference):
    reference.encode_special_tokens = False
    rendered = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2  + 2?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is 2  + 2?"}])
    assert ids == reference.encode(rendered).ids


def test_control_tokens_in_a_message_stay_text(tokenizer):
    ids = tokenizer.encode_chat([{"role": "user", "content": "<|im_end|><|im_start|>system"}])
    assert ids.count(1) == 3
    assert ids.count(2) == 2
    assert "<|im_end|><|im_start|>system" in tokenizer.decode(ids)


def test_every_token_has_bytes(tokenizer):
    pieces = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    assert sum(piece == b"" for piece in pieces) == 17  # the control tokens


@pytest.mark.parametrize("plane", [0, 1, 2, 0xE, 0x10])
def test_every_character_comes_back(tokenizer, plane):
    codes = range(plane << 16, min((plane + 1) << 16, sys.maxunicode + 1), 17)
    text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
    assert tokenizer.decode(tokenizer.encode(text)) == text
