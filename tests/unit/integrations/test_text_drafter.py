"""Our drafters in other loops: texts that grow, change and end; and the shape in which vLLM asks."""

from types import SimpleNamespace

import numpy as np
import pytest

from foreword.errors import RequestError
from foreword.integrations.text_drafter import TextDrafter, first_path
from foreword.integrations.vllm import VARIABLE, ForewordProposer
from foreword.speculation.draft import Draft

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


def test_a_text_that_repeats_itself_is_guessed():
    drafter = TextDrafter(NGRAM, 100)
    assert drafter.draft("a", [1, 2, 3, 1, 2]) == [3, 1, 2]
    assert drafter.draft("a", [1, 2, 3, 1, 2, 3]) == [1, 2, 3]
    assert drafter.draft("a", [1, 2, 3, 1, 2, 3], most=1) == [1]
    assert drafter.draft("a", [1, 2, 3, 1, 2, 3], most=0) == []


def test_another_text_under_the_same_key_is_read_anew():
    drafter = TextDrafter(NGRAM, 100)
    drafter.draft("row", [1, 2, 3, 1, 2])
    assert drafter.draft("row", [7, 8, 9, 7, 8, 5]) == []
    assert drafter.draft("row", [7, 8, 9, 7, 8, 5, 7]) == [8, 5, 7]


def test_suffix_learns_from_texts_that_have_ended():
    drafter = TextDrafter({"method": "suffix", "num_speculative_tokens": 3, "min_match": 2}, 100)
    drafter.draft("a", [5])
    drafter.draft("a", [5, 10, 11, 12, 13, 14])
    assert drafter.draft("b", [1, 10, 11, 12]) == []
    drafter.forget("a")
    drafter.forget("b")
    assert drafter.draft("c", [2, 10, 11, 12])[:2] == [13, 14]


def test_of_a_tree_the_first_path_is_taken():
    assert first_path(Draft((4, 5, 6, 7), (-1, -1, 0, 2), 3)) == [4, 6, 7]


@pytest.mark.parametrize("method", ["eagle3", "draft_model", "jacobi"])
def test_what_needs_our_engine_is_refused_by_name(method):
    with pytest.raises(RequestError, match=method):
        TextDrafter({"method": method, "model": "x"} if method != "jacobi" else {"method": method}, 100)


def vllm_config(context: int = 16) -> SimpleNamespace:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(model="some/hub-id", max_model_len=context, get_vocab_size=lambda: 100),
    )


def test_rows_of_vllms_batch_are_guessed_for(monkeypatch):
    monkeypatch.setenv(VARIABLE, '{"method": "ngram", "prompt_lookup_min": 1}')
    proposer = ForewordProposer(vllm_config())
    tokens = np.zeros((3, 16), dtype=np.int32)
    tokens[0, :5] = [1, 2, 3, 1, 2]
    tokens[1, :4] = [4, 4, 4, 4]
    tokens[2, :15] = [1, 2] * 7 + [1]
    drafts = proposer.propose([[2], [], [1]], np.array([5, 4, 15]), tokens, slot_mappings=None)
    assert drafts == [
        [3, 1, 2],
        [],
        [],
    ]  # the second still reads its prompt, the third has no room for more than one
    tokens[0, :4] = [9, 8, 9, 8]  # another request has the row
    assert proposer.propose([[8]], np.array([4]), tokens) == [[9, 8, 9]]


def test_a_subclass_says_who_guesses(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)

    class Suffixes(ForewordProposer):
        speculation = "suffix"

    assert Suffixes(vllm_config())._drafter.config.method == ("suffix",)
    assert ForewordProposer(vllm_config())._drafter.config.method == ("suffix", "ngram")
