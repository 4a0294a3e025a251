"""Assisted generation of the real transformers with our guesses: the texts are its own."""

from types import SimpleNamespace

import pytest
import torch

from foreword.integrations.transformers import foreword_candidates

PROMPT = [[1, 20, 21, 22, 23, 20, 21, 22, 23, 20, 21]]


@pytest.fixture(scope="module")
def model(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model)


def generated(model, **arguments):
    inputs = torch.tensor(PROMPT)
    out = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=40,
        eos_token_id=None,
        pad_token_id=0,
        **arguments,
    )
    return out[0, inputs.shape[1] :].tolist()


def test_greedy_texts_are_those_without_guesses(model):
    expected = generated(model, do_sample=False)
    with foreword_candidates(
        model, {"method": ["suffix", "ngram"], "num_speculative_tokens": 4}
    ) as candidates:
        assert generated(model, do_sample=False, prompt_lookup_num_tokens=4) == expected
        first = candidates.accepted
        assert generated(model, do_sample=False, prompt_lookup_num_tokens=4) == expected
    assert candidates.guessed > 0
    assert candidates.accepted - first > first  # suffix remembers the first answer
    assert generated(model, do_sample=False, prompt_lookup_num_tokens=4) == expected  # and is gone afterwards


@pytest.mark.parametrize(
    ("max_length", "ends", "expected"),
    [
        (100, None, [22, 23, 20, 21]),
        (14, None, [22, 23]),
        (12, None, []),
        (100, 23, [22]),
        (100, [7, 20], [22, 23]),
    ],
)
def test_a_draft_ends_before_the_maximum_length_and_before_an_end_token(max_length, ends, expected):
    text = torch.tensor(PROMPT)
    model = SimpleNamespace(config=SimpleNamespace(vocab_size=100))
    with foreword_candidates(model, {"method": "ngram", "num_speculative_tokens": 4}):
        config = SimpleNamespace(max_length=max_length, eos_token_id=ends)
        candidates, _ = model._get_candidate_generator(generation_config=config).get_candidates(text)
    assert candidates[0, text.shape[1] :].tolist() == expected


def test_sampled_texts_can_be_asked_for_too(model):
    with foreword_candidates(model):
        assert len(generated(model, do_sample=True, prompt_lookup_num_tokens=4)) == 40
