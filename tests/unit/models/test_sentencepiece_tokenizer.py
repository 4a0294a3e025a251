import gguf
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.acceptance.params import SamplingParams
from foreword.engine.messages import AnswerDelta
from foreword.engine.text import TokenTexts, Vocabulary
from foreword.errors import TokenizerError
from foreword.models.formats.gguf.file import GgufFile
from foreword.models.formats.gguf.tokenizer import gguf_tokenizer
from foreword.models.formats.hf.tokenizer import hf_tokenizer
from foreword.models.tokenization.detokenizer import IncrementalDetokenizer
from helpers.naive_bpe import merge_by_score
from helpers.nasty_texts import NASTY_TEXTS

SPACE = "\u2581"
# Longer entries score lower, as sentencepiece writes them: minus the order in which they were learned.
MERGED = ["th", "he", f"{SPACE}t", f"{SPACE}th", "the", f"{SPACE}the", "an", "and", f"{SPACE}and", "re"]
MERGED += ["here", SPACE * 2, SPACE * 4, "ee", "eee", "ing", "in", "ng", f"{SPACE}there"]
LETTERS = [SPACE, *"abcdefghijklmnopqrstuvwxyz", "é", "中", "<", ">", "/", "s>", "/s>"]
CONTROL, UNKNOWN, NORMAL, BYTE = 3, 2, 1, 6


def make_tokenizer(path, **flags):
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *MERGED, *LETTERS]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (len(MERGED) + len(LETTERS))]
    scores = [0.0] * 259 + [-float(number) for number in range(len(MERGED) + len(LETTERS))]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores(scores)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    for key, value in flags.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return gguf_tokenizer(GgufFile(path)), tokens, dict(zip(tokens[259:], scores[259:], strict=True))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("sentencepiece") / "model.gguf")


def expected_ids(text, tokens, scores):
    """Ids by the slow algorithm: merge by score, then bytes for what has no entry."""
    ids = []
    for piece in merge_by_score((SPACE + text).replace(" ", SPACE), scores):
        whole = piece in scores
        ids += [tokens.index(piece)] if whole else [3 + byte for byte in piece.encode()]
    return ids


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="theandrig é中😀", min_size=1, max_size=30))
def test_merging_equals_the_naive_algorithm(made, text):
    tokenizer, tokens, scores = made
    assert tokenizer.encode(text) == [1, *expected_ids(text, tokens, scores)]


@pytest.mark.parametrize("text", [text for text in NASTY_TEXTS if SPACE not in text])
def test_texts_come_back(made, text):
    tokenizer = made[0]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert not set(ids) & {0, 1, 2}
    assert tokenizer.decode(ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(map(detokenizer.push, ids)) + detokenizer.finish() == text


def test_what_the_file_says(made):
    tokenizer = made[0]
    assert tokenizer.bos_id == 1
    assert tokenizer.eos_ids == {2}
    assert tokenizer.encode("the") == [1, *tokenizer.encode("the", add_special_tokens=False)]


def test_no_space_is_put_before_a_text_if_the_file_says_so(tmp_path):
    flags = {"add_space_prefix": False, "add_bos_token": False}
    tokenizer, tokens, _ = make_tokenizer(tmp_path / "model.gguf", **flags)
    assert tokenizer.encode("the") == [tokens.index("the")]
    assert tokenizer.decode(tokenizer.encode(" the")) == " the"


def test_merging_cannot_form_control_tokens(made):
    tokenizer, tokens, _ = made
    ids = tokenizer.encode("<s></s>", add_special_tokens=False)
    assert [tokens[i] for i in ids] == [SPACE, "<", "s>", "<", "/s>"]


def test_missing_scores_are_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["a", "b"])
    writer.add_token_types([NORMAL, NORMAL])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(TokenizerError, match="scores"):
        gguf_tokenizer(GgufFile(tmp_path / "model.gguf"))


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.integers(259, 259 + len(MERGED) + len(LETTERS) - 1)))
def test_ids_decode_as_the_library_does(made, ids):
    tokenizer = made[0]
    ids = [1, *ids]
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)


def test_a_directory_with_the_same_kind_of_tokenizer(made, tmp_path):
    backend = tokenizers.Tokenizer.from_str(made[0]._backend.to_str())
    (tmp_path / "tokenizer.json").write_text(backend.to_str(), encoding="utf-8")
    again = hf_tokenizer(tmp_path, {})
    text = "the  there 中😀"
    assert again.strips_leading_space
    assert again.decode(again.encode(text)) == text


def answer_of(tokenizer, prompt, ids, stop=()):
    text = Vocabulary(400, tokenizer=tokenizer).answer_text(SamplingParams(stop=tuple(stop)), prompt)
    told = ""
    for token in ids:
        piece, ended = text.push(token)
        told += piece
        if ended is not None:
            return told, ended
    return told + text.finish(), None


def test_an_answer_keeps_the_space_between_it_and_the_prompt(made):
    tokenizer, tokens, _ = made
    prompt, answer = tokenizer.encode("the"), [tokens.index(f"{SPACE}and"), tokens.index(f"{SPACE}the")]
    assert answer_of(tokenizer, prompt, answer) == (" and the", None)
    assert answer_of(tokenizer, prompt, answer, stop=[" and"]) == ("", " and")
    assert answer_of(tokenizer, [1], answer) == ("and the", None)  # nothing before it but a control token


@pytest.mark.parametrize("prompt", [[1], [1, 270]])
def test_token_texts_are_cut_where_the_tokens_meet(made, prompt):
    tokenizer, tokens, _ = made
    answer = tuple(tokens.index(f"{SPACE}{word}") for word in ("and", "the", "there"))
    text, _ = answer_of(tokenizer, prompt, answer)
    pieces = TokenTexts(tokenizer).pieces(AnswerDelta("x", 0, text, answer))
    assert pieces == [" and" if len(prompt) > 1 else "and", " the", " there"]
    one_by_one = TokenTexts(tokenizer)
    told = [
        one_by_one.pieces(AnswerDelta("x", 0, piece, (token,)))
        for piece, token in zip(pieces, answer, strict=True)
    ]
    assert [piece for (piece,) in told] == pieces
