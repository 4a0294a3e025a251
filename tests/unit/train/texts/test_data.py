"""Training sets: whole shards, no more than a minute in memory, the same target on either way of writing."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from foreword.engine.assembly import make_core
from foreword.engine.loader import load_model
from foreword.errors import RequestError
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train import files
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.batches import EndlessBatch, EngineBatch, Job
from foreword.train.texts.data import WritingSettings, write_answers, write_training_set
from foreword.train.texts.documents import count_shards, read_shards
from foreword.train.texts.prompts import FilePrompt


class _Scripted:
    """Answers every job at once with its own prompt's last token, ten jobs at a time."""

    tokens_written = 0

    def __init__(self, end: int) -> None:
        self._end = end

    def run(self, jobs: Iterator[Job]) -> Iterator[None]:
        while True:
            for job in itertools.islice(jobs, 10):
                job.on_done([job.prompt[-1], 7, self._end])
                self.tokens_written += 3
            yield


@pytest.fixture
def tokenizer(tiny_model: Path):
    return open_checkpoint(tiny_model).tokenizer()


def test_texts_reach_the_disk_within_a_minute(tokenizer, tmp_path: Path):
    now = itertools.count(0, 20)  # every look at the clock is twenty seconds later
    seen: list[int] = []
    settings = WritingSettings(context=256, seconds=1000, clock=lambda: float(next(now)))
    write_training_set(
        _Scripted(min(tokenizer.eos_ids)),
        tokenizer,
        tmp_path,
        settings,
        on_progress=lambda report: seen.append(count_shards(tmp_path)),
    )
    assert count_shards(tmp_path) > 5
    assert seen[-1] > 3  # long before the end
    assert sum(1 for _ in read_shards(tmp_path)) > 20


def test_an_interruption_keeps_what_was_written(tokenizer, tmp_path: Path):
    calls = itertools.count()
    settings = WritingSettings(context=256, seconds=1e9, stop=lambda: next(calls) >= 3)
    report = write_training_set(_Scripted(min(tokenizer.eos_ids)), tokenizer, tmp_path, settings)
    assert report.documents == sum(1 for _ in read_shards(tmp_path)) > 0


def test_a_full_disk_is_told_in_a_line_and_leaves_no_shard(tokenizer, tmp_path: Path, monkeypatch):
    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "save_file", full)
    settings = WritingSettings(context=256, answer_tokens=10)
    with pytest.raises(RequestError, match=r"cannot be written.*No space left.*make room"):
        write_training_set(_Scripted(min(tokenizer.eos_ids)), tokenizer, tmp_path / "texts", settings)
    assert not list((tmp_path / "texts").iterdir())


def test_too_little_disk_is_told_before_anything_is_written(tokenizer, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(RequestError, match="0 MB free; make room"):
        write_training_set(_Scripted(2), tokenizer, tmp_path, WritingSettings(answer_tokens=1))


def test_the_engine_writes_what_the_captured_batch_writes(tiny_model: Path, target: PlainTarget, tokenizer):
    loaded = load_model(str(tiny_model), device="cpu", dtype="float32", backend="torch")
    core = make_core(loaded, None)
    prompts = [FilePrompt("x", (f"the sky is {word}",)) for word in ("blue", "red", "wide", "low", "dark")]
    engine = EngineBatch(core, rows=2)
    plain = EndlessBatch(target, rows=3, context=128, stop_ids=tokenizer.eos_ids)
    written = [write_answers(batch, tokenizer, prompts, max_new=12, context=128) for batch in (engine, plain)]
    assert [d.tokens.tolist() for d in written[0]] == [d.tokens.tolist() for d in written[1]]
    assert engine.tokens_written == sum(int(d.is_answer.sum()) for d in written[0])
    core.close()


def test_the_engine_draws_other_texts_with_another_seed(tiny_model: Path):
    core = make_core(load_model(str(tiny_model), device="cpu", dtype="float32", backend="torch"), None)

    def drawn(seed: int) -> list[list[int]]:
        found: list[list[int]] = []
        jobs = iter([Job([5, 6, 7], 8, 1.0, found.append) for _ in range(3)])
        for _ in EngineBatch(core, rows=1, seed=seed).run(jobs):
            pass
        return found

    first = drawn(0)
    assert first == drawn(0) != drawn(1)
    assert len({tuple(tokens) for tokens in first}) > 1
    core.close()


def test_prompts_that_are_too_long_to_measure_on_are_told(tokenizer, target: PlainTarget):
    batch = EndlessBatch(target, rows=1, context=16, stop_ids=frozenset())
    with pytest.raises(RequestError, match="no evaluation prompt fits"):
        write_answers(batch, tokenizer, [FilePrompt("x", ("word " * 50,))], max_new=8, context=16)
