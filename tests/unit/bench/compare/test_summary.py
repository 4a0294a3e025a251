"""Rates and ratios from answers that were written down, and who is chosen to take part."""

import pytest

from foreword.bench.compare import PeerAnswer, speeds_by_category, summarise
from foreword.bench.contestants import KINDS, Contestant, contestants
from foreword.errors import RequestError

PLAIN, AUTO = Contestant("foreword", "plain"), Contestant("foreword", "auto")
Q8, Q4, LOOKUP = (Contestant("llama.cpp", mode) for mode in ("Q8_0", "Q4_0", "Q4_0 lookup"))


def answer(
    contestant: Contestant, rate: float, *, ids: tuple[int, ...] = (1, 2, 3), prompt: int = 0
) -> PeerAnswer:
    """Eleven tokens, the first after a second."""
    return PeerAnswer(contestant.label, prompt, 0, 11, 1.0, 1, 1.0 + 10 / rate, 2**20, ids)


def test_ratios_are_to_the_fastest_plain_peer():
    answers = [
        answer(one, rate, prompt=prompt)
        for prompt in (0, 1)
        for one, rate in ((PLAIN, 30), (AUTO, 60), (Q8, 10), (Q4, 20), (LOOKUP, 40))
    ]
    beside, rows = summarise(answers, [PLAIN, AUTO, Q8, Q4, LOOKUP])
    assert beside == "llama.cpp Q4_0"
    assert [row.ratio.middle for row in rows] == pytest.approx([1.5, 3.0, 0.5, 1.0, 2.0])
    assert rows[1].tokens_per_second == pytest.approx(60)
    assert rows[1].first_ms == 1000


def test_without_peers_we_are_our_own_baseline():
    beside, rows = summarise([answer(PLAIN, 10), answer(AUTO, 20)], [PLAIN, AUTO, Q8])
    assert beside == "foreword plain"
    assert [row.label for row in rows] == ["foreword plain", "foreword auto"]


def test_without_plain_decoding_the_first_is_the_baseline_and_no_texts_are_compared():
    suffix = Contestant("foreword", "suffix+ngram")
    beside, rows = summarise([answer(AUTO, 20), answer(suffix, 30)], [AUTO, suffix])
    assert beside == "foreword auto"
    assert [row.ratio.middle for row in rows] == pytest.approx([1.0, 1.5])
    assert [row.same_as_plain for row in rows] == [None, None]
    assert summarise([], [AUTO]) == ("foreword plain", [])


def test_a_text_that_differs_from_plain_decoding_is_told():
    answers = [
        answer(PLAIN, 10),
        answer(AUTO, 20, ids=(1, 2, 4)),
        answer(PLAIN, 10, prompt=1),
        answer(AUTO, 20, prompt=1),
    ]
    _, rows = summarise(answers, [PLAIN, AUTO])
    assert [row.same_as_plain for row in rows] == [None, 0.5]


def test_a_text_is_compared_with_that_of_the_same_weights():
    _, rows = summarise(
        [answer(Q8, 10), answer(Q4, 10, ids=(4, 5)), answer(LOOKUP, 20, ids=(4, 5))], [Q8, Q4, LOOKUP]
    )
    assert [row.same_as_plain for row in rows] == [None, None, 1.0]


def test_speeds_by_category_are_medians_of_its_answers():
    rates = {0: 10, 1: 30, 2: 5}
    answers = [answer(PLAIN, rate, prompt=prompt) for prompt, rate in rates.items()]
    found = speeds_by_category(answers, ["chat", "chat", "code"])
    assert {name: round(speeds["foreword plain"]) for name, speeds in found.items()} == {
        "chat": 20,
        "code": 5,
    }


def test_modes_limit_how_engines_decode():
    python = {"llama.cpp": "python"}
    found = contestants(["llama.cpp"], python, modes=["plain", "stored lookup"])
    assert [one.label for one in found] == ["foreword plain", "llama.cpp stored lookup"]
    with pytest.raises(
        RequestError, match="--modes: no engine here has 'prompt lookup'; there are plain, auto"
    ):
        contestants(["llama.cpp"], python, modes=["prompt lookup"])


def test_who_takes_part(monkeypatch):
    monkeypatch.setattr("foreword.bench.contestants.find_spec", lambda name: None)
    assert {one.peer for one in contestants([], {})} == {"foreword"}
    named = contestants(["llama.cpp"], {"llama.cpp": "/some/python"})
    assert [one.mode for one in named if one.peer == "llama.cpp"] == list(KINDS["llama.cpp"].modes)
    assert named[-1].python == "/some/python"
    with pytest.raises(RequestError, match="not installed"):
        contestants(["vllm"], {})
    with pytest.raises(RequestError, match="there is no 'sglang'"):
        contestants(["sglang"], {})


def test_a_draft_model_is_given_to_those_who_take_one():
    python = {"llama.cpp": "python", "transformers": "python"}
    found = contestants(["llama.cpp", "transformers"], python, "draft.gguf")
    assert [one.label for one in found if one.draft] == ["foreword draft_model", "transformers assisted"]
    assert all(not one.is_plain and one.plain_label.endswith(" plain") for one in found if one.draft)
    assert not [one for one in contestants(["llama.cpp"], python) if one.draft]
