"""A form's state belongs to its answer: forks have their own, and neither preemption nor failures move it."""

from pathlib import Path

import pytest

from foreword import LLM, SamplingParams, StructuredOutputs
from foreword.backends.runner import ModelRunner
from foreword.engine.messages import NewRequest
from helpers.engines import ask, run

LETTERS = StructuredOutputs(regex="(ab|cd){2,6}!")
PARAMS = SamplingParams(structured=LETTERS, max_tokens=40, seed=5)


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(
        str(tiny_model),
        dtype="float32",
        device="cpu",
        speculation={"method": "suffix", "num_speculative_tokens": 4, "fixed": True},
    )


def text_of(llm: LLM, tokens: list[int]) -> str:
    return llm.tokenizer.decode(tokens)


def test_answers_to_one_prompt_have_states_of_their_own(llm: LLM):
    params = SamplingParams(structured=LETTERS, max_tokens=40, seed=5, n=4)
    for requests in (llm.engine.add(NewRequest("n", (5, 6, 7), params)),):
        run(llm.engine)
        texts = [text_of(llm, request.output_ids) for request in requests]
        assert all(request.finish_reason == "stop" for request in requests), [r.error for r in requests]
        assert all(text.endswith("!") for text in texts)
        assert len(set(texts)) > 1


def test_a_preempted_answer_goes_on_where_it_was(llm: LLM):
    plain = ask(llm.engine, [5, 6, 7], PARAMS)
    run(llm.engine)
    again = ask(llm.engine, [5, 6, 7], PARAMS)
    while again.finish_reason is None:
        llm.engine.step()
        if again in llm.engine.scheduler.running:
            llm.engine.scheduler.preempt(again)
    assert again.output_ids == plain.output_ids
    assert again.ledger.preemptions > 0


def test_a_pass_that_fails_moves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    plain = ask(llm.engine, [5, 6, 7], PARAMS)
    run(llm.engine)
    again = ask(llm.engine, [5, 6, 7], PARAMS)
    right, calls = ModelRunner.forward, iter(range(1000))

    def failing(self, batch):
        if next(calls) % 3 == 1:
            raise RuntimeError("planted")
        return right(self, batch)

    monkeypatch.setattr(ModelRunner, "forward", failing)
    run(llm.engine)
    assert again.output_ids == plain.output_ids


def test_an_aborted_answer_leaves_the_others_alone(llm: LLM):
    plain = ask(llm.engine, [5, 6, 7], PARAMS)
    run(llm.engine)
    gone, again = ask(llm.engine, [5, 6, 7], PARAMS, request_id="gone"), ask(llm.engine, [5, 6, 7], PARAMS)
    llm.engine.step()
    llm.engine.abort("gone")
    run(llm.engine)
    assert gone.finish_reason == "abort"
    assert again.output_ids == plain.output_ids


def test_an_answer_that_is_cut_off_says_length(llm: LLM):
    (output,) = llm.generate(
        {"prompt_token_ids": [5, 6, 7]}, SamplingParams(structured=LETTERS, max_tokens=2)
    )
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].text[:2] in ("ab", "cd", "a", "c")


def test_other_parameters_that_leave_nothing_end_the_answer_with_a_reason(llm: LLM):
    bad = SamplingParams(structured=StructuredOutputs(choice=["ab"]), min_tokens=30, max_tokens=40)
    (output,) = llm.generate({"prompt_token_ids": [5, 6, 7]}, bad)
    assert output.outputs[0].finish_reason == "error"
    assert "the answer's form" in str(output.outputs[0].error)


def test_the_drafter_of_forms_is_used_by_itself(llm: LLM):
    key = "a_rather_long_name_of_a_key"
    form = StructuredOutputs(json={"type": "object", "properties": {key: {"const": 1}}, "required": [key],
                                   "additionalProperties": False})  # fmt: skip
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(structured=form, max_tokens=60))[0]
    assert output.outputs[0].text == f'{{"{key}": 1}}'
    stats = output.outputs[0].stats
    assert stats is not None
    assert stats.method == "grammar+suffix"
    assert stats.accepted >= stats.output_tokens // 2
    off = llm.generate(
        {"prompt_token_ids": [5, 6, 7]}, SamplingParams(structured=form, max_tokens=60), speculation=False
    )[0]
    assert off.outputs[0].text == output.outputs[0].text
    assert off.outputs[0].stats is not None
    assert off.outputs[0].stats.drafted == 0
