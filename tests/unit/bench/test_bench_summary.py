"""Rows are ratios of sums over the prompts."""

from dataclasses import replace

import pytest
from rich.console import Console

from foreword.bench.drafters.measure import median_run
from foreword.bench.drafters.summary import ALL, drafter_table, slowest_prompts, summarise
from foreword.bench.skeleton import table
from helpers.bench_runs import GUESSING_RUN, record


def test_one_row_for_every_drafter_and_category_and_one_for_all():
    records = [record("a", "1"), record("b", "1"), record("a", "2", "code"), record("b", "2", "code")]
    rows = summarise(records)
    assert [(row.drafter, row.category, row.prompts) for row in rows] == [
        ("a", "chat", 1),
        ("a", "code", 1),
        ("a", ALL, 2),
        ("b", "chat", 1),
        ("b", "code", 1),
        ("b", ALL, 2),
    ]


@pytest.mark.parametrize("name", ["[code]", "[/code]"])
def test_names_in_brackets_are_no_markup(name: str):
    rows = summarise([record(f"ngram {name}", "1", name)])
    own = table(rows, {"kind": "{.category}", "drafter": lambda row: row.drafter}, name)
    console = Console(width=100)
    for shown, times in ((drafter_table(rows, name), 3), (own, 4)):
        with console.capture() as printed:
            console.print(shown)
        assert printed.get().count(name) == times


def test_the_figures_of_a_row():
    row = summarise(
        [record("a", "1"), record("a", "2", tokens=40, passes=30, drafted=20, accepted=10, seconds=5.0)]
    )[-1]
    assert row.alpha == pytest.approx(50 / 100)
    assert row.tau == pytest.approx(100 / 50)
    assert row.plain_tokens_per_second == pytest.approx(120 / 12)
    assert row.tokens_per_second == pytest.approx(100 / 8)
    assert row.speedup == pytest.approx(1.25)
    assert row.draft_ms == pytest.approx(1e3 * 0.2 / 50)
    assert row.verify_ms == pytest.approx(1e3 * 4.8 / 50)
    assert row.accept_ms == pytest.approx(1e3 * 0.6 / 50)
    assert row.draft_ms + row.verify_ms + row.accept_ms + row.rest_ms == pytest.approx(1e3 * 8 / 50)
    assert row.plain_step_ms == pytest.approx(100)


def test_texts_that_differ_are_counted_and_shown():
    rows = summarise([record("a", "1"), record("a", "2", token_ids=(1, 2, 4)), record("a", "3")])
    assert [row.different_texts for row in rows] == [1, 1]
    console = Console(width=160, record=True)
    console.print(drafter_table(rows, "title"))
    line = next(line for line in console.export_text().splitlines() if ALL in line)
    assert line.rstrip(" │").endswith("1")


def test_what_nobody_knows_is_not_zero():
    row = summarise([record("a", "1", drafted=0, accepted=0)])[0]
    assert row.alpha is None
    assert row.memory_bytes is None
    assert summarise([record("a", "1", memory_bytes=5), record("a", "2")])[0].memory_bytes == 5


def test_an_answer_that_ended_with_its_prompt_divides_by_nothing():
    row = summarise([record("a", "1", tokens=0, passes=0, seconds=0.0)])[0]
    assert (row.tau, row.speedup, row.draft_ms) == (0.0, 0.0, 0.0)
    found = record("a", "1", tokens=0, passes=0, seconds=0.0)
    assert summarise([replace(found, plain=replace(found.plain, tokens=0, seconds=0.0))])[0].speedup == 1.0


def test_of_several_repeats_the_median_counts():
    from dataclasses import replace

    runs = [replace(GUESSING_RUN, seconds=seconds) for seconds in (9.0, 2.0, 3.0)]
    assert median_run(runs) is runs[2]
    assert median_run(runs[:2]) is runs[1]


@pytest.mark.parametrize(
    ("size", "shown"), [(None, " - "), (0, "0.0 MB"), (2_340_000, "2.3 MB"), (104e6, "104 MB")]
)
def test_small_amounts_of_memory_are_not_shown_as_nothing(size: int | None, shown: str):
    console = Console(width=120)
    with console.capture() as capture:
        console.print(drafter_table(summarise([record("a", "1", memory_bytes=size)]), "title"))
    assert shown in capture.get()


def test_device_time_is_of_drafting_and_target_together():
    row = summarise([record("ngram", "1")])[-1]
    assert row.device_ms_per_token == pytest.approx(1e3 * (0.1 + 2.4 + 0.3) / 60)
    assert row.plain_device_ms_per_token == pytest.approx(1e3 * 5.5 / 60)


def test_the_prompts_that_lose_are_named_though_the_mean_gains():
    records = [
        record("a", "good", seconds=1.0),
        record("a", "bad", "rag", tokens=60, seconds=6.5),
        record("a", "fair", tokens=60, seconds=6.2),
        record("b", "bad", "rag", seconds=1.0),
    ]
    assert summarise(records)[2].speedup > 1
    first, second = slowest_prompts(records, most=2)
    assert (first.drafter, first.prompts, first.below) == ("a", 3, 1)
    assert first.worst == (("rag", "bad", pytest.approx(6 / 6.5)), ("chat", "fair", pytest.approx(6 / 6.2)))
    assert "1 of 3 prompts below 0.95" in first.line
    assert "0.92× rag bad" in first.line
    assert second.below == 0
    assert second.cpu_speedup is None and "processor" not in second.line


def test_the_processor_s_time_tells_a_busy_machine_from_a_bad_prompt():
    """Twice as long by the clock, for half of the work."""
    found = record("a", "slow", tokens=60, seconds=12.0)
    runs = {
        "speculative": replace(found.speculative, cpu_seconds=2.5),
        "plain": replace(found.plain, cpu_seconds=5.0),
    }
    (one,) = slowest_prompts([replace(found, **runs)])
    assert (one.below, one.cpu_below, one.cpu_speedup) == (1, 0, pytest.approx(2.0))
    assert one.cpu_worst == (("chat", "slow", pytest.approx(2.0)),)
    assert "by CPU time 2.00× in all, 0 below: 2.00× chat slow" in one.line


def test_answers_of_a_few_tokens_are_not_judged_by_themselves():
    """One ended with its first token, which the pass over the prompt gave: it took no time at all."""
    long, short, none = (record("a", name, tokens=tokens) for name, tokens in (("l", 60), ("s", 3), ("n", 0)))
    records = [
        replace(
            found,
            speculative=replace(
                found.speculative, seconds=2.0, cpu_seconds=2.0 * bool(found.speculative.tokens)
            ),
            plain=replace(
                found.plain,
                tokens=found.speculative.tokens,
                seconds=1.0,
                cpu_seconds=float(found is not none),
            ),
        )
        for found in (long, short, none)
    ]
    (one,) = slowest_prompts(records)
    assert (one.prompts, one.below) == (1, 1)
    assert one.cpu_speedup == pytest.approx(0.5)
