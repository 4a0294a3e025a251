"""Measuring on a tiny model."""

from pathlib import Path
from typing import Any

import pytest

from foreword.acceptance.params import SamplingParams
from foreword.backends.interface import HeadCall
from foreword.bench import verdict_time
from foreword.bench.drafters.decode import decode
from foreword.bench.drafters.measure import PLAIN, BenchSettings, DrafterBench
from foreword.bench.host_time import MODES, measure_host_time
from foreword.bench.methods import parse_methods
from foreword.bench.overhead import measure_overhead
from foreword.bench.prompts import BenchPrompt
from foreword.engine.llm import LLM

PROMPTS = [BenchPrompt("1", "chat", "the sky is blue"), BenchPrompt("2", "code", "def add(first, second):")]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return LLM(str(tiny_model))


def test_decoding_is_counted_from_behind_the_prompt(llm: LLM):
    llm.speculate(None)
    seen: list[int] = []
    prompt = llm.encode("the sky " * 20)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    run = decode(llm.engine, prompt, params, on_tokens=seen.extend)
    assert (run.tokens, run.passes, run.drafted) == (8, 8, 0)
    assert seen == list(run.token_ids)
    assert len(run.token_ids) == 9
    assert run.draft_seconds + run.verify_seconds + run.accept_seconds <= run.seconds
    assert run.memory_bytes is None
    assert not llm.engine.has_requests


def test_plain_and_guessing_take_turns_and_what_is_known_is_skipped(llm: LLM):
    bench = DrafterBench(llm, parse_methods("ngram,suffix"), BenchSettings(max_tokens=8, repeats=2))
    turns: list[tuple[int, str]] = []

    def note(stage: str, done: int, _: int) -> None:
        turns.append((done, stage.split(",", maxsplit=1)[0]))

    records = list(bench.measure(PROMPTS, [], note))
    assert turns == [(done, drafter) for done in (0, 1) for drafter in [PLAIN, "ngram", "suffix"] * 2]
    assert [(r.drafter, r.prompt) for r in records] == [
        (drafter, prompt.key) for prompt in PROMPTS for drafter in ("ngram", "suffix")
    ]
    assert all(record.identical for record in records)

    turns.clear()
    known = [record for record in records if (record.drafter, record.category) != ("suffix", "code")]
    again = list(bench.measure(PROMPTS, known, note))
    assert [(r.drafter, r.category) for r in again] == [("suffix", "code")]
    assert turns == [(1, PLAIN), (1, "suffix")] * 2  # its own baseline is measured beside it


def test_no_drafter_finds_pages_that_another_run_has_filled(llm: LLM):
    """A head reads prompts along: pages of plain decoding would leave it without a past."""
    long = [BenchPrompt("1", "chat", "the sky is blue and the sea is deep " * 4)]
    bench = DrafterBench(llm, parse_methods("ngram,suffix"), BenchSettings(max_tokens=4, repeats=2))
    before = llm.engine.cache.prefix_hits
    list(bench.measure(long, [], lambda *_: None))
    assert llm.engine.cache.prefix_hits == before


def test_memory_is_that_while_the_request_runs(llm: LLM):
    methods = parse_methods('ngram,suffix,{"method": "layer_skip", "exit_layer": 1}')
    bench = DrafterBench(llm, methods, BenchSettings(max_tokens=8))
    sizes = {
        record.drafter: record.speculative.memory_bytes
        for record in bench.measure(PROMPTS, [], lambda *_: None)
    }
    assert len(sizes) == 3
    assert all(size is not None and size > 0 for size in sizes.values())


def test_drafters_learn_from_the_run_only_when_told_to(llm: LLM):
    twice = [BenchPrompt(name, "chat", "the sky is blue") for name in "12"]

    def accepted(history: bool) -> list[int]:
        bench = DrafterBench(llm, parse_methods("suffix"), BenchSettings(max_tokens=24, history=history))
        records = list(bench.measure(twice, [], lambda *_: None))
        assert all(record.identical for record in records)
        return [record.speculative.passes for record in records]

    first, second = accepted(history=False)
    assert first == second
    first, second = accepted(history=True)
    assert second < first


def test_overhead_reports_how_far_it_is(llm: LLM):
    reported: list[tuple[str, int, int]] = []
    measure_overhead(llm, parse_methods("ngram"), [20, 40], 2, lambda *step: reported.append(step))
    stages = [stage for stage, _, _ in reported]
    assert [f"drafting after {context} tokens" in stages for context in (20, 40)] == [True, True]
    assert all(done <= total for _, done, total in reported)
    assert len(reported) >= 8


def test_host_time_is_that_of_steps_which_do_what_they_say(llm: LLM):
    found = measure_host_time(llm, [1, 3], 1, lambda *_: None)
    assert [(one.way, one.batch) for one in found] == [(way, batch) for batch in (1, 3) for way in MODES]
    by_way = {one.way: one for one in found if one.batch == 3}
    assert by_way["plain"].tokens == 1
    assert min(by_way["ngram"].tokens, by_way["suffix"].tokens) > 1.5, by_way  # they guess, and are right
    assert all(one.step_ms > 0 for one in found)


def test_verdicts_are_timed_on_steps_whose_guesses_are_right(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    begun: list[int] = []
    draft = verdict_time._FreeChains.draft

    def seen(self: Any, call: HeadCall) -> Any:
        if call.plan is not None:
            begun.append(call.plan.unsettled is not None)
        return draft(self, call)

    monkeypatch.setattr(verdict_time._FreeChains, "draft", seen)
    found = verdict_time.measure_verdicts(llm.engine.target, [2], 1, lambda *_: None)
    assert [(one.guesses, one.batch) for one in found] == [("lookup", 2), ("head", 2)]
    assert all(3 < one.tokens < 1 + verdict_time.DRAFT_TOKENS for one in found), found
    assert all(min(one.verdict_ms, one.launch_ms, one.beside_ms) > 0 for one in found)
    assert sum(begun) == len(begun) - 1  # all but the first are begun behind passes that are still judged


def test_random_heads_are_measured_for_what_they_cost(llm: LLM):
    methods = ("eagle", "eagle3", "p_eagle", "mtp", "medusa", "dflash", "dspark")
    forms = ",".join(f'{{"method": "{method}", "model": "random"}}' for method in methods)
    bench = DrafterBench(llm, parse_methods(forms), BenchSettings(max_tokens=8))
    records = list(bench.measure(PROMPTS[:1], [], lambda *_: None))
    assert [record.drafter for record in records] == [f"{method} model=random" for method in methods]
    assert [record.drafter for record in records if not record.identical] == []
    assert [record.drafter for record in records if not record.speculative.drafted] == []
    assert all(record.speculative.memory_bytes for record in records)
    measured = measure_overhead(llm, parse_methods(forms), [12], 1, lambda *_: None)
    assert len(measured) == len(methods)
