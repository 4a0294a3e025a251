"""When trainings begin, what becomes of their versions, and what rollback and forget do."""

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foreword.control.policy_file.document import Stage
from foreword.control.policy_file.parsing import read_policy
from foreword.errors import RequestError
from foreword.learn.directory import lock_directory
from foreword.learn.texts import KeptTexts
from foreword.learn.training import LOG, SHARED_MEMORY
from foreword.learn.versions import Versions
from helpers.learn_world import MODEL, LearnWorld


@pytest.fixture
def world(tmp_path: Path) -> LearnWorld:
    return LearnWorld(tmp_path / "learn")


def _file(world: LearnWorld) -> dict[str, str]:
    """The policy file's drafters, each with its first stage."""
    policy = read_policy(world.settings.policy_path)
    return {rule.drafter: rule.start for rule in policy.rollouts}


def _stages(world: LearnWorld) -> dict[int, tuple[str, str]]:
    return {version.number: (version.stage, version.reason) for version in world.learner.report().versions}


def test_a_training_begins_after_enough_answer_tokens(world: LearnWorld):
    world.serve(4)
    world.idle(times=3)
    assert not world.processes and world.learner.report().state == "collecting"
    world.serve(1)
    world.idle()
    assert world.learner.report().state == "training"
    world.idle()
    process = world.process
    assert process.arguments[:2] == ["train", "eagle3"] and "--begin" not in process.arguments
    assert process.option("--model") == "model" and process.option("--device") == "cpu"
    assert Path(process.option("--data")).stat().st_mode & 0o077 == 0
    if SHARED_MEMORY.is_dir():
        assert Path(process.option("--data")).parent == SHARED_MEMORY


def test_a_better_head_becomes_a_version_and_the_texts_are_deleted(world: LearnWorld):
    world.train(None, 1.5)
    assert not Path(world.process.option("--data")).exists()
    report = world.learner.report()
    assert report.state == "rolling out" and report.trainings == 1 and report.failures == 0
    (version,) = report.versions
    assert (version.number, version.tau_before, version.tau_after) == (1, 1.0, 1.5)
    assert version.tokens == 800 and version.train_seconds == 1
    folder = world.versions.path(1)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "learned.json", "log.jsonl"}
    assert report.new_tokens == 0


@pytest.mark.parametrize(
    ("before", "after", "is_kept"), [(2.0, 2.03, True), (2.0, 2.01, False), (2.0, float("nan"), False)]
)
def test_a_head_is_kept_if_it_is_better(
    tmp_path: Path, tiny_heads: Any, before: float, after: float, is_kept: bool
):
    world = LearnWorld(tmp_path / "learn", tiny_heads["eagle3"])
    world.train(before, after)
    assert "--begin" in world.process.arguments
    assert (world.versions.candidate == 1) is is_kept
    assert world.process.head.exists() is False
    if not is_kept:
        report = world.learner.report()
        assert report.versions == () and "version 1 was not kept" in report.reason
        assert report.state == "collecting" and report.new_tokens == 0


def test_a_first_head_must_beat_plain_decoding(world: LearnWorld):
    world.train(None, 1.19)
    assert world.versions.candidate is None
    assert "1.200 were needed" in world.learner.report().reason


def test_a_version_that_is_on_replaces_the_one_before(world: LearnWorld):
    world.train_and_use(1)
    assert _file(world) == {"learned-1": "on"}
    world.train()
    assert world.process.option("--begin") == str(world.versions.path(1))
    assert _file(world) == {"learned-1": "on", "learned-2": "shadow"}
    world.serve(40)
    world.controller.adopt()
    world.idle(times=5)
    assert len(world.processes) == 2  # none begins during a roll-out
    world.roll_out(2)
    assert _file(world) == {"learned-2": "on"}
    report = world.learner.report()
    assert report.version == 2 and _stages(world)[1] == ("off", "a newer version is used")
    assert world.emptied == [1, 2]  # their rows are missing in cached pages
    world.idle(times=2)
    assert len(world.processes) == 3


@pytest.mark.parametrize("stage", [Stage.OFF, Stage.HELD])
def test_a_candidate_that_is_dropped_leaves_the_file(world: LearnWorld, stage: Stage):
    world.train_and_use(1)
    world.train()
    world.controller.adopt()
    world.move(2, stage, "gain: too low")
    world.idle()
    assert _file(world) == {"learned-1": "on"} and world.versions.path(2).exists()
    assert _stages(world)[2] == (stage.value, "gain: too low") and world.learner.report().version == 1


def test_a_version_in_use_that_a_guard_holds_leaves_the_file(world: LearnWorld):
    world.train_and_use(1)
    world.move(1, Stage.HELD, "gain: 0.9 of plain decoding")
    world.idle()
    assert _file(world) == {} and world.learner.report().version is None


def test_a_version_leaves_before_another_one_comes(world: LearnWorld):
    """Otherwise both would need KV rows at once."""
    world.train_and_use(1)
    world.train_and_use(2)
    world.learner.act("rollback", "")
    assert _file(world) == {}
    world.controller.adopt()
    world.idle()
    assert _file(world) == {"learned-1": "on"}


def test_a_version_that_cannot_be_loaded_is_given_up(world: LearnWorld):
    world.train_and_use(1)
    world.train()
    for _ in range(60):
        world.idle()
        if world.versions.candidate is None:
            break
    assert "could not load it" in _stages(world)[2][1]
    world.idle()
    assert _file(world) == {"learned-1": "on"}


def test_rollback_uses_the_parent_at_once_and_never_the_version_again(world: LearnWorld):
    world.train_and_use(1)
    world.train_and_use(2)
    world.serve(40)
    world.idle(times=2)  # a training from version 2 runs
    world.learner.act("rollback", "")
    assert "kill" in world.process.calls
    assert world.learner.report().version == 1 and _stages(world)[2] == ("held", "rolled back by hand")
    world.learner.act("rollback", "")
    assert world.learner.report().version is None
    world.learner.act("rollback", "")  # nothing is left to roll back
    world.controller.adopt()
    world.idle()
    assert _file(world) == {}


def test_rollback_drops_a_candidate_as_well(world: LearnWorld):
    world.train_and_use(1)
    world.train()
    world.learner.act("rollback", "")
    assert (world.versions.current, world.versions.candidate) == (None, None)
    assert set(_stages(world)) == {1, 2}


def test_forget_deletes_the_texts_and_all_versions_trained_on_them(world: LearnWorld):
    world.serve(40, "a")
    world.train_and_use(1)  # of a and the server's own tenant
    world.serve(10, "b")
    world.train_and_use(2)
    world.learner.act("forget", "b")
    assert world.learner.report().version == 1 and set(_stages(world)) == {1}
    assert not world.versions.path(2).exists() and "b" not in {text.tenant for text in world.texts}
    world.learner.act("forget", "a")
    assert _stages(world) == {} and world.learner.report().version is None
    world.controller.adopt()
    world.train(None)
    assert world.versions.candidate == 3  # numbers are not used again: drafters are cached by path


def test_forget_deletes_all_versions_that_descend_from_the_texts(world: LearnWorld):
    world.serve(40, "a")
    world.train_and_use(1)
    world.texts.forget("a")  # they leave by their age
    world.train_and_use(2)
    world.learner.act("forget", "a")
    assert _stages(world) == {} and world.learner.report().version is None


def test_forget_ends_a_training_on_the_texts(world: LearnWorld):
    world.serve(40, "a")
    world.idle(times=2)
    world.learner.act("forget", "b")
    assert world.process.calls == []
    world.learner.act("forget", "a")
    assert world.process.calls == ["kill"] and not Path(world.process.option("--data")).exists()
    assert world.learner.report().failures == 0


def test_the_log_says_which_head_is_in_use_after_an_action(
    world: LearnWorld, caplog: pytest.LogCaptureFixture
):
    world.train_and_use(1)
    world.train_and_use(2)
    with caplog.at_level("INFO"):
        world.learner.act("rollback", "")
        world.learner.act("forget", "")
    rolled_back, forgotten = [text for text in caplog.messages if text.startswith("learning: ")]
    assert rolled_back == "learning: rolled back; version 1 of the head is in use"
    assert forgotten == "learning: the tenant without an API key is forgotten; the initial head is in use"


def test_an_unknown_action_is_only_logged(world: LearnWorld, caplog: pytest.LogCaptureFixture):
    world.learner.act("dance", "")
    assert "'dance'" in caplog.text


def test_failed_trainings_are_repeated_after_growing_pauses(world: LearnWorld):
    world.serve(40)
    pauses = []
    for _ in range(9):
        world.idle(times=2)
        count = len(world.processes)
        (world.settings.home / LOG).write_text("step 1\nerror: the disk is full\n\n", encoding="utf-8")
        world.process.head.mkdir()
        world.process.code = 1
        world.idle()
        report = world.learner.report()
        assert report.reason == "error: the disk is full" and report.state == "failed"
        assert not world.process.head.exists() and not Path(world.process.option("--data")).exists()
        began = world.clock.now
        while len(world.processes) == count:
            world.idle(10)
        pauses.append(world.clock.now - began)
    assert world.learner.report().failures == 9
    assert pauses[:3] == [pytest.approx(60, abs=21), pytest.approx(120, abs=21), pytest.approx(240, abs=21)]
    assert pauses[-1] == pytest.approx(3600, abs=21)
    world.process.end_well(None, 1.5)
    world.idle()
    assert world.learner.report().reason == "" and world.versions.candidate is not None


def test_a_killed_training_has_failed(world: LearnWorld):
    world.serve(40)
    world.idle(times=2)
    world.process.code = -9
    world.idle()
    assert world.learner.report().reason == "signal 9 ended the training"


def test_a_training_without_measurement_or_log_has_failed(world: LearnWorld):
    world.serve(40)
    world.idle(times=2)
    world.process.code = 0
    world.idle()
    assert "log.jsonl" in world.learner.report().reason and world.learner.report().failures == 1


def test_texts_that_cannot_be_written_fail_the_training(world: LearnWorld, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise RequestError("no space left")

    monkeypatch.setattr("foreword.learn.training.write_shard", full)
    world.serve(40)
    world.idle(times=2)
    assert not world.processes
    assert world.learner.report().reason == "its texts cannot be written: no space left"


@pytest.mark.parametrize(
    "log", ["{", '{"set": "held out", "step": 0}', '{"set": "held out", "tau": []}', "[]"]
)
def test_a_damaged_log_fails_the_training(world: LearnWorld, log: str):
    world.serve(40)
    world.idle(times=2)
    world.process.end_well(None, 1.5)
    (world.process.head / "training/log.jsonl").write_text(log, encoding="utf-8")
    world.idle()
    report = world.learner.report()
    assert report.state == "failed" and report.failures == 1 and "Error" in report.reason
    assert not Path(world.process.option("--data")).exists() and not world.process.head.exists()


def test_a_training_without_any_text_has_failed(world: LearnWorld):
    world.serve(40)
    world.work.is_held = True
    world.idle()
    assert world.trainings.job is not None
    world.trainings._run.job = replace(world.trainings.job, kept=KeptTexts((), 0, 0))  # type: ignore[union-attr]
    world.work.release()
    world.idle()
    assert world.learner.report().reason == "no texts are left to train on"


def test_a_version_that_cannot_be_written_has_failed(world: LearnWorld, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise RequestError("no space left")

    world.serve(40)
    world.idle(times=2)
    world.process.end_well(None, 1.5)
    with monkeypatch.context() as patch:
        patch.setattr(Versions, "publish", full)
        world.idle()
    report = world.learner.report()
    assert report.reason == "version 1 was not kept: no space left" and report.versions == ()
    assert not world.process.head.exists()
    world.serve(40)
    with monkeypatch.context() as patch:
        patch.setattr(Versions, "begin", full)
        world.idle(100)
    assert world.learner.report().reason == "no space left" and len(world.processes) == 1
    assert not world.trainings.may_begin


def test_a_full_disk_drops_no_version_in_use(world: LearnWorld, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise RequestError("no space left")

    world.train_and_use(1)
    world.versions.candidate, world.versions.current = 1, None
    with monkeypatch.context() as patch:
        patch.setattr("foreword.learn.rollout.write_policy", full)
        world.controller.document = replace(world.controller.document, drafters={})
        world.idle(times=100)
    assert world.versions.candidate == 1


def test_slow_work_is_done_in_the_background(tmp_path: Path):
    """Nothing that takes long with many texts or large heads happens in the engine's thread."""
    world = LearnWorld(tmp_path / "learn", keeps_texts=True)
    world.serve(40)
    world.work.is_held = True
    world.idle(times=2)
    assert not world.processes and not (world.settings.home / "texts").exists()
    world.work.release()
    assert world.processes and (world.settings.home / "texts").exists()
    world.idle()
    world.process.end_well(None, 1.5)
    world.work.is_held = True
    world.idle(times=2)
    assert (world.process.head / "training").exists() and world.versions.candidate is None
    world.work.release()
    world.idle()
    assert world.versions.candidate == 1


def test_a_training_that_is_stopped_while_it_is_prepared_leaves_nothing(world: LearnWorld):
    """Its texts were written, and its process started, after the tenant's deletion."""
    world.serve(40, "a")
    world.work.is_held = True
    world.idle()
    before = _private_folders()
    world.learner.act("forget", "a")
    world.work.release()
    assert world.trainings.job is None and not world.processes
    assert _private_folders() == before


def test_a_process_that_starts_while_its_training_is_stopped_is_killed(
    world: LearnWorld, monkeypatch: pytest.MonkeyPatch
):
    start = world.trainings.start

    def forget_first(*arguments: Any) -> Any:
        process = start(*arguments)
        world.learner.act("forget", "a")
        return process

    world.trainings.start = forget_first
    world.serve(40, "a")
    world.idle(times=2)
    assert world.process.calls == ["kill"] and not Path(world.process.option("--data")).exists()
    assert world.trainings.job is None


def _private_folders() -> set[Path]:
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return set(folder.glob("foreword-learn-*"))


def test_an_action_that_fails_does_not_end_the_engine(
    world: LearnWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: object) -> None:
        raise KeyError(3)

    monkeypatch.setattr(Versions, "roll_back", broken)
    world.learner.act("rollback", "")
    assert "rollback failed" in caplog.text


def test_texts_stored_before_a_deletion_are_deleted(tmp_path: Path):
    world = LearnWorld(tmp_path / "learn", keeps_texts=True)
    world.serve(40, "a")
    world.serve(5, "b")
    world.work.is_held = True
    world.idle()
    world.learner.act("forget", "a")
    world.work.release()
    assert [path.name for path in (world.settings.home / "texts").iterdir()] == ["b"]


def test_forget_deletes_directories_of_unknown_tenants(world: LearnWorld):
    world.train_and_use(1)
    (world.versions.path(7)).mkdir()
    (world.versions.path(7) / "learned.json").write_text("{", encoding="utf-8")
    versions = _reopened(world)
    assert not versions.forget("a")
    assert {path.name for path in (world.settings.home / "versions").iterdir()} == {"1"}


def test_a_deletion_that_is_interrupted_is_finished_at_the_next_start(world: LearnWorld):
    world.train_and_use(1)
    world.work.is_held = True
    removed: list[Path] = []
    versions = Versions(world.settings.home, MODEL, "here", removed.append)
    versions.forget("")
    assert removed and removed[0].exists() and not versions.all
    assert not _reopened(world).all and not removed[0].exists()


def test_texts_of_a_killed_engine_are_deleted_at_the_next_start(world: LearnWorld):
    world.serve(40)
    world.idle(times=2)
    data = Path(world.process.option("--data"))
    assert data.exists()
    LearnWorld(world.settings.home)
    assert not data.exists()


def test_only_the_newest_versions_are_kept(tmp_path: Path):
    world = LearnWorld(tmp_path / "learn", kept_versions=2)
    for number in range(1, 5):
        world.train_and_use(number)
    assert sorted(path.name for path in (world.settings.home / "versions").iterdir()) == ["3", "4"]
    world.learner.act("rollback", "")
    world.learner.act("rollback", "")
    assert world.versions.current is None  # version 2 does not exist any more


def test_the_policy_file_is_valid_and_names_only_the_cohort_other(world: LearnWorld):
    world.train()
    policy = read_policy(world.settings.policy_path)
    (rule,) = policy.rollouts
    assert (rule.drafter, rule.cohort, rule.start, rule.steps) == ("learned-1", "other", "shadow", (25, 100))
    assert (rule.min_requests, rule.min_passes, rule.verify_samples, rule.min_levels) == (20, 1000, 20, 500)
    assert policy.drafters["learned-1"].config["model"] == str(world.versions.path(1))


def _reopened(world: LearnWorld, environment: str = "here") -> Versions:
    return Versions(world.settings.home, MODEL, environment)


def test_the_version_in_use_is_used_after_a_restart(world: LearnWorld):
    world.train_and_use(1)
    world.learner.close()
    assert (_reopened(world).current, _reopened(world).candidate) == (1, None)


def test_in_another_environment_it_is_rolled_out_again(world: LearnWorld):
    world.train_and_use(1)
    world.learner.close()
    versions = _reopened(world, "there")
    assert (versions.current, versions.candidate) == (None, 1)


def test_a_candidate_goes_on_after_a_restart_but_not_after_a_crash(world: LearnWorld):
    world.train()
    world.learner.close()
    versions = _reopened(world)
    assert versions.candidate == 1
    versions = _reopened(world)  # the engine before did not close
    assert versions.candidate is None and "unexpectedly" in versions.dropped[1].reason


def test_unfinished_and_damaged_versions_are_not_used(world: LearnWorld):
    world.train_and_use(1)
    folder = world.settings.home / "versions"
    (folder / ".7").mkdir()
    (folder / "8").mkdir()
    (folder / "9").mkdir()
    (folder / "9/learned.json").write_text("{}", encoding="utf-8")
    shutil.copytree(folder / "1", folder / "10")
    learned = (folder / "1/learned.json").read_text("utf-8").replace('"number": 1,', '"number": "10",')
    (folder / "10/learned.json").write_text(learned, encoding="utf-8")
    versions = _reopened(world)
    assert set(versions.all) == {1} and versions.current == 1 and not (folder / ".7").exists()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"next": "x", "current": 1}',
        '{"next": Infinity, "current": 1}',
        '{"current": [1]}',
        '{"current": true}',
        '{"dropped": {"1": 2}}',
    ],
)
def test_a_damaged_state_is_not_used(world: LearnWorld, text: str):
    world.train_and_use(1)
    (world.settings.home / "state.json").write_text(text, encoding="utf-8")
    versions = _reopened(world)
    assert versions.current is None and versions.begin()[0] == 2


def test_a_directory_of_another_model_is_refused(world: LearnWorld):
    with pytest.raises(RequestError, match="heads of another model; give another --learn-dir"):
        Versions(world.settings.home, "another", "here")


def test_a_second_server_on_the_directory_is_refused(tmp_path: Path):
    release = lock_directory(tmp_path)
    with pytest.raises(RequestError, match="another server learns in"):
        lock_directory(tmp_path)
    release()
    again = lock_directory(tmp_path)
    release()  # again, which closes nothing: the descriptor may be another file's now
    with pytest.raises(RequestError):
        lock_directory(tmp_path)
    again()


def test_a_directory_that_cannot_be_written_to_is_refused(tmp_path: Path):
    (tmp_path / "lock").mkdir()
    with pytest.raises(RequestError, match="cannot be written to: Is a directory; give another --learn-dir"):
        lock_directory(tmp_path)


def test_which_requests_are_kept(world: LearnWorld):
    def end(**changes: Any) -> int:
        values: dict[str, Any] = {
            "finish_reason": "stop",
            "identity": SimpleNamespace(assigned=SimpleNamespace(is_replay=False), adapter=None),
            "tokens": [1, 2, *range(20)],
            "prompt_len": 2,
            "output_ids": list(range(20)),
            "tenant": "t",
            "params": SimpleNamespace(temperature=0.7),
        }
        before = len(world.texts)
        world.learner.ended(SimpleNamespace(**values | changes))  # type: ignore[arg-type]
        return len(world.texts) - before

    assert end() == end(finish_reason="length") == 1
    assert end(finish_reason="abort") == end(finish_reason="error") == end(finish_reason="deadline") == 0
    assert end(identity=SimpleNamespace(assigned=SimpleNamespace(is_replay=True), adapter=None)) == 0
    assert end(identity=SimpleNamespace(assigned=SimpleNamespace(is_replay=False), adapter="a")) == 0
    assert [text.document.temperature for text in world.texts] == [0.7, 0.7]


def test_steps_and_batches_follow_the_amount_of_text(tmp_path: Path):
    world = LearnWorld(tmp_path / "learn", text_tokens=4096, min_tokens=20_000)
    world.serve(40, answer=1000)
    world.idle(times=2)
    new = world.process
    tokens = sum(1003 for text in world.texts if not text.document.held_out)
    batch, steps = int(new.option("--batch-tokens")), int(new.option("--steps"))
    assert batch == pytest.approx(10 * tokens / 100, abs=1) and steps == pytest.approx(100, abs=1)
    assert (new.option("--muon"), new.option("--adam")) == ("0.02", "0.001")


def test_a_long_text_fits_into_a_batch(tmp_path: Path):
    world = LearnWorld(tmp_path / "learn", text_tokens=4096)
    world.serve(9, answer=4000)
    world.idle(times=2)
    assert int(world.process.option("--batch-tokens")) >= 1.2 * 4003


def test_the_engine_waits_less_while_a_training_runs(world: LearnWorld):
    assert world.learner.idle_seconds == 1.0
    world.serve(40)
    world.idle(times=2)
    assert world.learner.idle_seconds == 0.2
    world.learner.busy()
    assert world.learner.report().state == "paused" and world.process.calls == ["pause"]


def test_closing_ends_the_training_and_stores_texts_if_wanted(tmp_path: Path):
    world = LearnWorld(tmp_path / "learn", keeps_texts=True)
    world.serve(40)
    world.idle(times=2)
    world.learner.close()
    world.learner.close()
    assert world.process.calls == ["kill"] and not Path(world.process.option("--data")).exists()
    assert (world.settings.home / "texts/-").is_dir()
    assert json.loads((world.settings.home / "state.json").read_text())["is_closed"]


def test_texts_are_not_stored_unless_wanted(world: LearnWorld):
    world.serve(40)
    world.learner.close()
    assert not (world.settings.home / "texts").exists()
