"""Grammars are tried in a process of its own, which is ended when one takes too much."""

import gc
import json
import os
import signal
import sys
from pathlib import Path
from threading import Event, Thread, get_native_id

import pytest

from foreword.errors import RequestError
from foreword.structured.compiled import LARGE_BYTES
from foreword.structured.compiler import MAX_CACHED_BYTES, MAX_GRAMMAR_BYTES, CompileSlots, Grammars
from foreword.structured.limits import CompileLimits
from foreword.structured.masks import NICENESS, in_yielding_thread
from foreword.structured.params import StructuredOutputs
from foreword.structured.trial_process import vocabulary_as_json, vocabulary_from, with_longest_pieces
from foreword.structured.trials import CompileTrials
from helpers.tiny_grammars import allowed, token_table
from helpers.waiting import wait_until

MANY_ITEMS = StructuredOutputs(json={"type": "array", "items": {"type": "integer"}, "maxItems": 10**9})
LONG = StructuredOutputs(json={"type": "integer", "multipleOf": 1_000_003})
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the system has no limit on memory")
SMALL = StructuredOutputs(choice=["abc", "ab"])


@pytest.fixture(scope="module")
def trials():
    made = CompileTrials(token_table(), CompileLimits(cpu_seconds=60, memory_bytes=64 << 20))
    yield made
    made.close()


@LINUX
def test_a_grammar_that_takes_too_much_memory_is_ended_and_the_next_one_is_tried(trials: CompileTrials):
    with pytest.raises(RequestError, match="json takes more than 64 MiB to compile; make it smaller"):
        trials.run(MANY_ITEMS)
    pid = trials.pid
    assert trials.run(SMALL) >= 0
    assert trials.pid == pid


def test_a_grammar_that_takes_too_long_is_ended():
    trials = CompileTrials(token_table(), CompileLimits(cpu_seconds=0.3, patience=1000, memory_bytes=4 << 30))
    with pytest.raises(RequestError, match=r"json takes longer than 0\.3 s to compile; make it smaller"):
        trials.run(LONG)
    trials.close()


@LINUX
def test_what_a_trial_refuses_is_never_compiled_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foreword.structured.compiler.compiled", lambda *_: pytest.fail("compiled"))
    monkeypatch.setattr("foreword.structured.compiler.check_counts", lambda _: None)
    kept = Grammars(token_table, CompileLimits(cpu_seconds=60, memory_bytes=64 << 20))
    with pytest.raises(RequestError, match="MiB to compile"):
        kept.begin(MANY_ITEMS)
    kept.close()


def test_a_process_that_was_killed_is_started_again(trials: CompileTrials):
    trials.run(SMALL)
    assert trials.pid is not None
    first = trials._process
    assert first is not None
    os.kill(trials.pid, signal.SIGKILL)
    first.wait()
    assert trials.run(SMALL) >= 0
    assert trials._process is not first


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere/python"])
def test_a_process_that_cannot_start_is_not_waited_for(program: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("foreword.structured.trials.START_SECONDS", 1e6)
    many = with_longest_pieces(
        [b"x" * 100 for _ in range(10_000)], (0,), [0], frozenset()
    )  # more than a pipe holds
    trials = CompileTrials(many, CompileLimits())
    monkeypatch.setattr(sys, "executable", program)
    with pytest.raises(RequestError, match="the process that compiles grammars has ended; try again"):
        trials.run(SMALL)
    trials.close()


def test_the_process_imports_nothing_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "json.py").write_text("raise SystemExit(1)")
    monkeypatch.chdir(tmp_path)
    trials = CompileTrials(token_table(), CompileLimits(cpu_seconds=60))
    assert trials.run(SMALL) >= 0
    trials.close()


def test_a_trial_in_a_process_that_is_closed_is_refused():
    trials = CompileTrials(token_table(), CompileLimits(cpu_seconds=60, memory_bytes=4 << 30))
    refused: list[str] = []

    def try_it() -> None:
        with pytest.raises(RequestError) as error:
            trials.run(LONG)
        refused.append(str(error.value))

    trials.run(SMALL)
    thread = Thread(target=try_it)
    thread.start()
    wait_until(lambda: bool(trials._waiting))
    trials.close()
    thread.join()
    assert refused == ["structured outputs: the process that compiles grammars has ended; try again"]


@LINUX
def test_trials_that_still_run_end_with_the_process():
    trials = CompileTrials(token_table(), CompileLimits(cpu_seconds=60, memory_bytes=4 << 30))
    trials.run(SMALL)
    children = Path(f"/proc/{trials.pid}/task/{trials.pid}/children")
    thread = Thread(target=refused, args=(trials,))
    thread.start()
    wait_until(lambda: bool(children.read_text().split()))
    running = int(children.read_text().split()[0])
    os.kill(running, signal.SIGSTOP)  # it does not end by itself
    try:
        trials.close()
        thread.join()
        wait_until(lambda: has_ended(running))
    finally:
        if not has_ended(running):
            os.kill(running, signal.SIGKILL)


def refused(trials: CompileTrials) -> None:
    with pytest.raises(RequestError):
        trials.run(LONG)


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits for its parent to take notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_the_process_ends_with_its_owner():
    trials = CompileTrials(token_table(), CompileLimits())
    trials.run(SMALL)
    process = trials._process
    assert process is not None
    del trials
    gc.collect()
    assert process.wait() == 0


def test_grammars_that_take_much_memory_are_kept_in_small_numbers(monkeypatch: pytest.MonkeyPatch):
    fit = MAX_CACHED_BYTES // MAX_GRAMMAR_BYTES
    sizes = iter([MAX_GRAMMAR_BYTES] * (fit + 1) + [LARGE_BYTES])
    returned: list[None] = []
    monkeypatch.setattr(CompileTrials, "run", lambda self, wanted: next(sizes))
    monkeypatch.setattr("foreword.structured.compiled.return_free_memory", lambda: returned.append(None))
    kept = Grammars(token_table)
    forms = [StructuredOutputs(choice=["a" * count]) for count in range(1, fit + 3)]
    for form in forms:
        kept.begin(form)
    gc.collect()
    assert [kept.is_ready(form) for form in forms] == [False, *[True] * fit, False]
    assert len(returned) == 1


def test_a_grammar_too_large_to_keep_is_compiled_once_for_all_answers_to_a_request(
    monkeypatch: pytest.MonkeyPatch,
):
    sizes = iter([MAX_CACHED_BYTES + 1])
    monkeypatch.setattr(CompileTrials, "run", lambda self, wanted: next(sizes))
    states = Grammars(token_table).begin_all(SMALL, 5)
    assert len({id(state._grammar) for state in states}) == 1


@LINUX
def test_grammars_are_compiled_at_a_low_priority_and_errors_come_out():
    own = os.getpriority(os.PRIO_PROCESS, get_native_id())
    assert in_yielding_thread(lambda: os.getpriority(os.PRIO_PROCESS, get_native_id())) == max(own, NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, get_native_id()) == own
    with pytest.raises(KeyError):
        in_yielding_thread(lambda: {}["missing"])


def test_no_tenant_takes_all_turns():
    turns = CompileSlots(CompileLimits(cpu_seconds=0.001, patience=1, at_once=3, at_once_per_tenant=2))
    going_on, inside = Event(), []

    def compile_long(tenant: str) -> None:
        with turns.reserved(tenant):
            inside.append(tenant)
            going_on.wait()

    threads = [Thread(target=compile_long, args=("many",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(inside) == 2)
    with pytest.raises(RequestError, match="try again"), turns.reserved("many"):
        pass
    with turns.reserved("other"):
        inside.append("other")
    going_on.set()
    for thread in threads:
        thread.join()
    with turns.reserved("many"):
        assert inside[-1] == "other"


def test_a_vocabulary_of_any_bytes_reaches_the_process():
    pieces = [bytes([byte]) for byte in range(256)] + [b"<end>", b"\xff\xfe"]
    tokens = with_longest_pieces(pieces, (256,), [256], frozenset({"<end>"}))
    received = vocabulary_from(json.loads(json.dumps(vocabulary_as_json(tokens))))
    assert (received.pieces, received.end_ids) == (pieces, (256,))
    assert (list(received.control_ids), received.control_names) == ([256], {"<end>"})
    assert received.encode("ab") == [ord("a"), ord("b")]


def test_an_answer_of_a_grammar_that_was_tried_begins_as_ever():
    kept = Grammars(token_table)
    assert allowed(kept.begin(SMALL)) == [b"a", b"ab", b"abc"]
    kept.close()
