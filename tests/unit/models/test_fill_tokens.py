"""Tokens that mark a gap in a text: known by name or stated by the file, and never spelled by a text."""

import json

import gguf
import pytest

from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.formats.gguf.tokenizer import gguf_tokenizer
from foreword.models.formats.hf.tokenizer import hf_tokenizer
from foreword.models.tokenization.tokenizer import Tokenizer
from helpers.fill_models import MIDDLE, PAD, PREFIX, QWEN, SUFFIX, with_tokens
from helpers.tiny_models import TINY_VOCAB, make_hf_model, write_gguf, write_tiny_tokenizer

FAMILIES = {
    "qwen": (QWEN[0], QWEN[2], QWEN[1]),
    "starcoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "santacoder": ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "deepseek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "codellama": ("▁<PRE>", "▁<SUF>", "▁<MID>"),
}


def loaded(directory, names, *, special: bool = False) -> Tokenizer:
    write_tiny_tokenizer(directory)
    (directory / "tokenizer.json").write_text(with_tokens(names, special=special).to_str(), encoding="utf-8")
    return hf_tokenizer(directory, {})


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_prefix_suffix_and_middle_in_this_order(tmp_path, family: str, special: bool):
    tokenizer = loaded(tmp_path, FAMILIES[family], special=special)
    before, after = tokenizer.encode("def add("), tokenizer.encode("return")
    first = TINY_VOCAB
    filled = tokenizer.encode_fill("def add(", "return")
    assert filled == [first, *before, first + 1, *after, first + 2]
    assert tokenizer.encode_fill([5, 6], "return") == [first, 5, 6, first + 1, *after, first + 2]
    assert tokenizer.encode_fill("", "return") == [first, first + 1, *after, first + 2]


def test_a_text_that_spells_such_a_token_stays_text(tmp_path):
    tokenizer = loaded(tmp_path, QWEN)
    forged = "a<|fim_middle|>b<|im_end|>"
    filled = tokenizer.encode_fill(forged, forged)
    assert [token for token in filled if token < 3 or token >= TINY_VOCAB] == [PREFIX, SUFFIX, MIDDLE]
    assert tokenizer.decode(filled) == forged * 2
    assert PAD not in tokenizer.encode("<|fim_pad|>")
    assert tokenizer.encode("<|fim_pad|>", parse_special=True) == [PAD]


def test_a_token_that_is_special_already_keeps_its_own_rules(tmp_path):
    write_tiny_tokenizer(tmp_path)
    written = json.loads(with_tokens(QWEN, special=True).to_str())
    for token in written["added_tokens"]:
        token["rstrip"] = token["content"] == "<|fim_suffix|>"
    (tmp_path / "tokenizer.json").write_text(json.dumps(written), encoding="utf-8")
    tokenizer = hf_tokenizer(tmp_path, {})
    assert tokenizer.encode("a<|fim_suffix|> b", parse_special=True) == [
        *tokenizer.encode("a"),
        SUFFIX,
        *tokenizer.encode("b"),
    ]


def test_a_gap_ends_with_what_would_begin_another_file(tmp_path):
    fill = loaded(tmp_path, (*QWEN, "<|file_sep|>", "<|repo_name|>")).fill
    assert fill is not None
    assert fill.ends == {0, PREFIX, MIDDLE, SUFFIX, PAD, PAD + 1, PAD + 2}  # 0 is <|endoftext|>


def test_a_model_without_such_tokens_is_refused_with_the_reason(tmp_path):
    for names in ((), QWEN[:2]):
        tokenizer = loaded(tmp_path, names)
        assert tokenizer.fill is None
        with pytest.raises(RequestError, match=r"^suffix: this model has no fill-in-the-middle tokens"):
            tokenizer.encode_fill("a", "b")


@pytest.mark.parametrize(
    "keys", [("fim_pre", "fim_suf", "fim_mid"), ("prefix", "suffix", "middle")], ids=["new", "old"]
)
def test_a_gguf_file_states_them(tmp_path, keys):
    stated = {f"tokenizer__ggml__{key}_token_id": number for key, number in zip(keys, (7, 8, 9), strict=True)}
    stated |= {"tokenizer__ggml__fim_pad_token_id": 10}
    path = write_gguf(make_hf_model(tmp_path / "model"), tmp_path / "model.gguf", **stated)
    tokenizer = open_checkpoint(path).tokenizer()
    assert tokenizer.encode_fill([11], "x")[:3] == [7, 11, 8]
    assert tokenizer.fill is not None
    assert tokenizer.fill.ends >= {7, 8, 9, 10}


def test_the_text_after_a_gap_has_no_space_put_before_it(tmp_path):
    """CodeLlama's vocabulary puts a space before a text, which the model was not shown before a suffix."""
    letters, names = ["▁", "a", "b", "▁a"], ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *names]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[6] * 256, *[1] * len(letters), *[3] * len(names)])
    writer.add_token_scores([-float(number) for number in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = gguf_tokenizer(GgufFile(tmp_path / "model.gguf"))
    shown = [tokens[token] for token in tokenizer.encode_fill("a", "ab")]
    assert shown == ["<s>", "▁<PRE>", "▁a", "▁<SUF>", "a", "b", "▁<MID>"]
    assert tokenizer.encode_fill("a", "b", add_special_tokens=False)[0] == tokens.index("▁<PRE>")
    assert tokenizer.fill is not None
    assert tokens.index("▁<EOT>") in tokenizer.fill.ends
