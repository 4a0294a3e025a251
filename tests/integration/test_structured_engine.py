"""A form's state belongs to its answer: forks have their own, and neither preemption nor failures move it."""

from pathlib import Path
from threading import Event

import pytest

from foreword import LLM, SamplingParams, StructuredOutputs
from foreword.backends.runner import ModelRunner
from foreword.engine.messages import NewRequest
from foreword.structured.state import GrammarState
from helpers.clocks import ScriptedClock
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
        assert all(request.finish_reason == "stop" for request in requests), [
            r.answer.error for r in requests
        ]
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
    assert again.accounting.preemptions > 0


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


def test_others_go_on_while_a_slow_mask_is_computed_and_its_text_is_the_same(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
):
    expected = ask(llm.engine, [5, 6, 7], PARAMS)
    run(llm.engine)
    right, going_on = GrammarState.prepare, Event()

    def held_up(self: GrammarState) -> None:
        going_on.wait()
        right(self)

    monkeypatch.setattr(GrammarState, "prepare", held_up)
    monkeypatch.setattr(llm.engine._grammars, "clock", ScriptedClock(tick=0.02))
    slow = ask(llm.engine, [5, 6, 7], PARAMS)
    other = ask(llm.engine, [5, 6, 8], SamplingParams(max_tokens=30, ignore_eos=True))
    while other.finish_reason is None:
        llm.engine.step()
    assert slow.finish_reason is None
    assert slow in llm.engine.scheduler.running
    assert not slow.sampler.is_ready
    llm.engine.step()  # nothing can be done, and nothing fails
    going_on.set()
    run(llm.engine)
    assert slow.output_ids == expected.output_ids
    assert slow.finish_reason == "stop"


def test_an_answer_whose_masks_take_too_much_in_all_fails_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(llm.engine._grammars, "clock", ScriptedClock(tick=0.09))
    form = StructuredOutputs(grammar='root ::= s\ns ::= s s s | s s | "a" | "b" | ""')
    slow = ask(llm.engine, [5, 6, 7], SamplingParams(structured=form, max_tokens=60, min_tokens=50, seed=1))
    other = ask(llm.engine, [5, 6, 8], SamplingParams(max_tokens=60, ignore_eos=True))
    run(llm.engine)
    assert slow.finish_reason == "error"
    assert "its masks took over 1 s more than allowed for its tokens" in str(slow.answer.error)
    assert "\n" not in str(slow.answer.error)
    assert other.finish_reason == "length"


def test_a_closed_engine_leaves_no_process(tiny_model: Path):
    mine = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu", speculation="off")
    mine.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(structured=LETTERS, max_tokens=4))
    ready = mine.engine._grammars._ready
    assert ready is not None
    process = ready[2]._process
    assert process is not None
    mine.engine.close()
    assert process.poll() is not None
