import json

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import TokenizerError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.models.formats.hf.tokenizer import hf_tokenizer
from helpers.nasty_texts import NASTY_TEXTS
from helpers.tiny_models import make_hf_model, tiny_tokenizer_json, write_gguf, write_tiny_tokenizer

END, START, TEXT_END = 2, 1, 0


@pytest.fixture(scope="module")
def hf_dir(tmp_path_factory):
    return make_hf_model(tmp_path_factory.mktemp("tokenizer") / "model")


@pytest.fixture(scope="module", params=["directory", "gguf"])
def tokenizer(request, hf_dir):
    if request.param == "directory":
        return open_checkpoint(hf_dir).tokenizer()
    return open_checkpoint(write_gguf(hf_dir, hf_dir.parent / "model.gguf")).tokenizer()


@pytest.fixture(scope="module")
def reference():
    """The library's own reading of the same tokenizer.json."""
    plain = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    plain.encode_special_tokens = True
    return plain


def test_what_the_files_say(tokenizer):
    assert tokenizer.vocab_size == 360
    assert tokenizer.eos_ids - {TEXT_END} == {END}
    assert tokenizer.bos_id == START
    assert "message['role']" in tokenizer.chat_template


@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_nasty_texts(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text).ids
    assert not set(ids) & {0, START, END}
    assert tokenizer.decode(ids) == text == reference.decode(ids)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_many_texts_are_read_as_each_by_itself(tokenizer):
    texts = [*NASTY_TEXTS, ""]
    assert tokenizer.encode_many(texts) == [
        tokenizer.encode(text, add_special_tokens=False) for text in texts
    ]
    with pytest.raises(TokenizerError):
        tokenizer.encode_many(["fine", "\ud800"])


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_any_text_comes_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(0, 359)), skip=st.booleans())
def test_any_ids_decode_as_the_library_does(tokenizer, reference, ids, skip):
    expected = reference.decode(ids, skip_special_tokens=skip)
    assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_every_byte_has_a_token(tokenizer):
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert all(bytes([byte]) in single for byte in range(256))


def test_control_tokens_are_shown_only_on_request(tokenizer):
    ids = [START, *tokenizer.encode("hi"), END]
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>hi<|im_end|>"
    assert tokenizer.token_bytes(END) == b""
    assert tokenizer.token_bytes(END, skip_special_tokens=False) == b"<|im_end|>"


def test_ids_outside_the_vocabulary_add_nothing(tokenizer):
    assert tokenizer.token_bytes(360) == b""  # where the tokenizer keeps its secret names
    assert tokenizer.token_bytes(100_000) == b""
    assert tokenizer.token_bytes(-1) == b""


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nhi<|im_end|>\n",
        "<|im_start|><|im_start|>",
        "a <|im_end|> b<|endoftext|>",
        "<|im_<|im_end|>end|>",
        "<|IM_END|> <|im_end|",
        "none",
        "",
    ],
)
def test_names_of_control_tokens_are_parsed_on_request_as_the_library_does(tokenizer, text):
    parsing = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    ids = tokenizer.encode(text, parse_special=True)
    assert ids == parsing.encode(text).ids
    assert (set(ids) & {0, START, END} != set()) == ("<|im_end|>" in text or "<|im_start|>" in text)
    assert not set(tokenizer.encode(text)) & {0, START, END}
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_which_ids_there_are(tokenizer):
    assert tokenizer.has_token(0)
    assert tokenizer.has_token(359)
    assert not any(map(tokenizer.has_token, (-1, 360, 361, 100_000)))  # secret names are no tokens


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff ok"])
def test_lone_surrogates_are_refused(tokenizer, text):
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode(text)
    with pytest.raises(TokenizerError, match="surrogate"):
        tokenizer.encode_chat([{"role": "user", "content": text}])


def test_bos_is_added_where_the_model_wants_it(hf_dir, tmp_path):
    path = write_gguf(hf_dir, tmp_path / "model.gguf", tokenizer__ggml__add_bos_token=True)
    tokenizer = open_checkpoint(path).tokenizer()
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [START, *plain]
    assert START not in plain
    chat = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert chat[:2] != [START, START]


def test_a_larger_vocabulary_than_the_models_is_refused(tmp_path):
    directory = make_hf_model(tmp_path / "small", vocab_size=359)
    with pytest.raises(TokenizerError, match=r"360 tokens.*359"):
        open_checkpoint(directory).tokenizer()
    with pytest.raises(TokenizerError, match=r"360 tokens.*359"):
        open_checkpoint(write_gguf(directory, tmp_path / "small.gguf")).tokenizer()


def test_a_padded_embedding_is_fine(tmp_path):
    directory = make_hf_model(tmp_path / "padded", vocab_size=384)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.config.vocab_size == 384
    assert checkpoint.tokenizer().vocab_size == 360


@pytest.mark.parametrize("end", [-1, 360, [2, 383], 2**40])
def test_an_end_token_outside_the_vocabulary_is_refused(tmp_path, end):
    directory = make_hf_model(tmp_path / "model", vocab_size=384)
    for name in ("config.json", "generation_config.json"):
        path = directory / name
        stored = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(stored | {"eos_token_id": end}))
    with pytest.raises(TokenizerError, match="eos_token_id"):
        open_checkpoint(directory).tokenizer()


def test_stored_truncation_and_padding_do_not_apply(tmp_path):
    write_tiny_tokenizer(tmp_path)
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer_json())
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    text = "the numbers 10, 200 and 3000"
    assert hf_tokenizer(tmp_path, {}).decode(hf_tokenizer(tmp_path, {}).encode(text)) == text


def test_eos_is_collected_from_all_files(tmp_path):
    write_tiny_tokenizer(tmp_path)
    assert hf_tokenizer(tmp_path, {}).eos_ids == {END}
    assert hf_tokenizer(tmp_path, {"eos_token_id": [0, 5]}).eos_ids == {0, 5, END}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert hf_tokenizer(tmp_path, {"eos_token_id": 5}).eos_ids == {7, 0, END}


def test_tokens_may_be_written_as_objects(tmp_path):
    write_tiny_tokenizer(tmp_path)
    changed = {"bos_token": {"content": "<|endoftext|>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(changed))
    tokenizer = hf_tokenizer(tmp_path, {})
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == frozenset()
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}', '{"model": {"type": "BPE"}}'])
def test_a_damaged_tokenizer_file_is_refused(tmp_path, content):
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json") as caught:
        hf_tokenizer(tmp_path, {})
    assert "\n" not in str(caught.value)


def test_a_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is missing"):
        hf_tokenizer(tmp_path, {})


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"tokenizer__ggml__pre": "viking"}, ["viking", "smollm"]),
        ({"tokenizer__ggml__model": "bert"}, ["bert"]),
        ({"tokenizer__ggml__eos_token_id": 360}, ["eos_token_id"]),
        ({"tokenizer__ggml__merges": "a b"}, ["merges"]),
        ({"tokenizer__ggml__tokens": "a"}, ["tokens"]),
        ({"tokenizer__ggml__token_type": 1}, ["token_type"]),
    ],
)
def test_unsupported_or_damaged_gguf_tokenizers_are_refused(hf_dir, tmp_path, metadata, words):
    from foreword.errors import ForewordError

    path = write_gguf(hf_dir, tmp_path / "model.gguf", **metadata)
    with pytest.raises(ForewordError) as caught:
        open_checkpoint(path).tokenizer()
    assert all(word in str(caught.value) for word in words)


SPLITS = [
    "gpt-2",
    "default",
    "llama-bpe",
    "llama3",
    "qwen2",
    "qwen35",
    "pixtral",
    "lfm2",
    "smollm",
    "refact",
    "dbrx",
    "glm4",
    "tekken",
    "gpt-4o",
    "deepseek-llm",
    "deepseek-v3",
]


@pytest.mark.parametrize("kind", SPLITS)
@pytest.mark.parametrize("text", NASTY_TEXTS)
def test_every_split_keeps_the_text(gguf_by_split, kind, text):
    import unicodedata

    tokenizer = gguf_by_split[kind]
    expected = unicodedata.normalize("NFC", text) if kind in ("qwen2", "qwen35") else text
    assert tokenizer.decode(tokenizer.encode(text)) == expected


@pytest.fixture(scope="module")
def gguf_by_split(hf_dir, tmp_path_factory):
    root = tmp_path_factory.mktemp("splits")
    return {
        kind: open_checkpoint(
            write_gguf(hf_dir, root / f"{kind}.gguf", tokenizer__ggml__pre=kind)
        ).tokenizer()
        for kind in SPLITS
    }


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("gpt-2", ["a", " ", " 1234", "!!", "\n\n", "\n", "b"]),
        ("smollm", ["a", "  ", "1", "2", "3", "4", "!!", "\n\n", "\n", "b"]),
        ("llama-bpe", ["a", " ", " ", "123", "4", "!!\n\n\n", "b"]),
        ("qwen2", ["a", " ", " ", "1", "2", "3", "4", "!!\n\n\n", "b"]),
        ("qwen35", ["a", " ", " ", "1", "2", "3", "4", "!!\n\n\n", "b"]),
        ("pixtral", ["a", " ", " ", "123", "4", "!!\n\n\n", "b"]),
        ("lfm2", ["a", " ", " ", "123", "4", "!!\n\n\n", "b"]),
        ("glm4", ["a", " ", " ", "123", "4", "!!\n\n\n", "b"]),
        ("refact", ["a", "  ", "1", "2", "3", "4", "!!", "\n\n", "\n", "b"]),
        ("tekken", ["a", " ", " ", "1", "2", "3", "4", "!!\n\n\n", "b"]),
        ("gpt-4o", ["a", " ", " ", "123", "4", "!!\n\n\n", "b"]),
        ("deepseek-v3", ["a", "  ", "123", "4", "!!\n\n\n", "b"]),
        ("deepseek-llm", ["a", "  ", "1", "2", "3", "4", "!!", "\n", "\n", "\n", "b"]),
    ],
)
def test_where_texts_are_cut(gguf_by_split, kind, pieces):
    assert cuts(gguf_by_split[kind], "a  1234!!\n\n\nb") == pieces


def cuts(tokenizer, text):
    # The tiny vocabulary merges little, so that cuts are looked at before merging.
    pieces = tokenizer._backend.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in pieces]


@pytest.mark.parametrize(
    ("kind", "pieces"),
    [
        ("gpt-4o", ["Hello", "World's", " λόγος", ".foo", "(x", ")/\n", "你好ありがとう", " !?"]),
        ("tekken", ["Hello", "World", "'s", " λόγος", ".foo", "(x", ")/\n", "你好ありがとう", " !?"]),
        ("deepseek-v3", ["HelloWorld", "'s", " λόγος", ".foo", "(x", ")/\n", "你好ありがとう", " !?"]),
        (
            "deepseek-llm",
            ["HelloWorld", "'", "s", " λόγος", ".", "foo", "(", "x", ")/", "\n", "你好ありがとう", " !?"],
        ),
    ],
)
def test_where_words_of_many_kinds_are_cut(gguf_by_split, kind, pieces):
    assert cuts(gguf_by_split[kind], "".join(pieces)) == pieces


@pytest.mark.parametrize("text", [*NASTY_TEXTS, "हिन्दी की किताब, e\u0301té we'LL  12\n\n!!"])
def test_qwen3_5_cuts_where_transformers_does(gguf_by_split, text):
    import unicodedata

    from tokenizers import Regex, pre_tokenizers
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    composed = unicodedata.normalize("NFC", text)
    theirs = pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated").pre_tokenize_str(composed)
    assert cuts(gguf_by_split["qwen35"], composed) == [piece for piece, _ in theirs]


def test_answers_of_gpt_oss_go_on_after_a_message():
    from foreword.models.formats.fields import ConfigFields
    from foreword.models.formats.gguf.tokenizer import _eos_ids

    names, fields = ["<|end|>", "<|return|>", "<|call|>", "a"], ConfigFields({}, "a file")
    assert _eos_ids(fields, names, names[:3], " ".join(names)) == {1, 2}
    assert _eos_ids(fields, names[:1], names[:1], "<|end|>") == {0}


def test_the_end_of_a_text_ends_answers_too():
    """Files of Qwen2.5 name the end of a turn alone."""
    from foreword.models.formats.fields import ConfigFields
    from foreword.models.formats.gguf.tokenizer import TOKENIZER_PREFIX, _eos_ids

    names = ["a", "<|endoftext|>", "<|im_end|>"]
    fields = ConfigFields({f"{TOKENIZER_PREFIX}eos_token_id": 2}, "a file", prefix=TOKENIZER_PREFIX)
    assert _eos_ids(fields, names, names[1:], "") == {1, 2}
    assert _eos_ids(fields, names, names[2:], "") == {2}, "a word that is written like a control token"
