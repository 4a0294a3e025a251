"""Defects of requests that end, or are left, before they are queued, and of threads that outlive their engine."""

from catalogue import LOGPROBS, UNIT, Mutant

LATE = "tests/integration/test_drafters_made_late.py"
ADAPTERS = "tests/integration/test_adapter_engine.py"
EARLY_DRAFTS = f"{UNIT}/speculation/test_anticipating.py"

EARLY_MUTANTS = (
    Mutant(
        101,
        "an abort before a request is queued is forgotten",
        "engine/listeners.py",
        "Listeners.abort_later",
        "listener.is_aborted = True",
        "pass",
        (f"{LATE}::test_an_abort_counts_though_the_drafter_is_still_being_made",),
    ),
    Mutant(
        101,
        "a request that was left is ended in the name of a later one",
        "engine/engine.py",
        "Engine._enqueue",
        "return",
        "self._deliver(self._core.abort(stream.request_id))\nreturn",
        (f"{LATE}::test_an_abort_of_a_request_that_was_left_does_not_end_a_later_one_of_the_same_id",),
    ),
    Mutant(
        101,
        "an abort of an ended request ends a later one of the same id",
        "engine/engine.py",
        "Engine.abort",
        "self._listeners.knows(stream)",
        "True",
        (f"{LATE}::test_an_abort_of_an_ended_request_does_not_end_a_later_one_of_the_same_id",),
    ),
    Mutant(
        101,
        "a request whose thread cannot be started keeps its id",
        "engine/engine.py",
        "Engine.submit",
        "self._listeners.forget(stream)",
        "pass",
        (f"{LATE}::test_a_request_whose_thread_cannot_be_started_leaves_its_id_free",),
    ),
    Mutant(
        102,
        "a closed engine leaves its threads in compiled code",
        "engine/core.py",
        "EngineCore.close",
        "self.background.close()",
        "",
        (f"{LATE}::test_an_engine_that_is_closed_meanwhile_cancels_the_making_and_ends_the_stream",),
    ),
    Mutant(
        102,
        "a model is loaded to its end for an engine that is closed",
        "backends/weight_loader.py",
        "WeightLoader.count",
        "check_cancelled()",
        "",
        (f"{UNIT}/backends/test_cancelled_loading.py",),
    ),
    Mutant(
        102,
        "a head is loaded to its end for an engine that is closed",
        "models/heads/files.py",
        "HeadFiles.load",
        "check_cancelled()",
        "",
        (f"{UNIT}/backends/test_cancelled_loading.py",),
    ),
    Mutant(
        103,
        "a drafter is closed before the request that was prepared with it is queued",
        "engine/core.py",
        "EngineCore.prepare",
        "for request in requests:\n    self.drafters.hold(request)",
        "",
        (f"{LATE}::test_a_prepared_request_keeps_its_drafter_until_it_is_queued_or_discarded",),
    ),
    Mutant(
        103,
        "a drafter is closed between its choice and its first use",
        "engine/guessing/drafter_pool.py",
        "DrafterPool._let_go",
        "self._users[id(drafter)] or self._blocks",
        "self._users[id(drafter)]",
        (f"{UNIT}/engine/guessing/test_drafter_pool.py",),
    ),
    Mutant(
        104,
        "adapters are lost when the pages are laid out anew",
        "engine/llm.py",
        "LLM",
        "def _make_again(self, speculation: SpeculationOption, offered: Sequence[SpeculationConfig]=()) "
        "-> None:\n"
        '    """Replace the engine, whose memory is freed first; if that fails, by one with its drafters '
        'and adapters."""\n'
        "    before, adapters = (self._default(), self.engine.adapters)\n"
        "    self.engine.close()\n"
        "    del self.engine, self._pipeline\n"
        "    try:\n"
        "        self._take(make_core(self.loaded, self._config, speculation, offered, "
        "preparing=self._preparing))\n"
        "    except BaseException:\n"
        "        self._take(make_core(self.loaded, self._config, before, preparing=self._preparing))\n"
        "        self.engine.adapters.take_over(adapters)\n"
        "        raise\n"
        "    self.engine.adapters.take_over(adapters)",
        "def _make_again(self, speculation: SpeculationOption, offered: Sequence[SpeculationConfig]=()) "
        "-> None:\n"
        '    """Replace the engine, whose memory is freed first; if that fails, by one with its drafters '
        'and adapters."""\n'
        "    before, adapters = (self._default(), self.engine.adapters)\n"
        "    self.engine.close()\n"
        "    del self.engine, self._pipeline\n"
        "    try:\n"
        "        self._take(make_core(self.loaded, self._config, speculation, offered, "
        "preparing=self._preparing))\n"
        "    except BaseException:\n"
        "        self._take(make_core(self.loaded, self._config, before, preparing=self._preparing))\n"
        "        self.engine.adapters.take_over(adapters)\n"
        "        raise",
        (f"{ADAPTERS}::test_the_library_loads_what_a_call_asks_for_and_keeps_it",),
    ),
    Mutant(
        105,
        "a token's rank counts those that are as likely",
        "acceptance/logprobs.py",
        "_score_group",
        "(logits > chosen).sum(dim=-1) + 1",
        "(logits >= chosen).sum(dim=-1)",
        (f"{LOGPROBS}::test_tokens_that_are_equally_likely_have_the_same_rank",),
    ),
    Mutant(
        105,
        "a draft from before a preemption is judged",
        "speculation/proposing.py",
        "usable",
        "if draft.epoch != request.epoch:\n    return NO_DRAFT",
        "",
        (f"{UNIT}/speculation/test_usable_drafts.py",),
    ),
    Mutant(
        105,
        "an exit that joined late reads rows that were never filled",
        "drafters/heads/exit.py",
        "ExitHead._guess",
        "self._rows_of(found).begin",
        "0",
        ("tests/integration/test_exit_rows.py::test_an_exit_that_joined_late_reads_none_of_the_rows_before",),
    ),
    Mutant(
        105,
        "a drafter that was not to draft goes on after the pass",
        "speculation/anticipating.py",
        "anticipate",
        "observer.is_on and anticipates(observer.drafter)",
        "anticipates(observer.drafter)",
        (EARLY_DRAFTS,),
    ),
    Mutant(
        105,
        "an early draft begins with the states of a run's first token",
        "speculation/anticipating.py",
        "anticipate",
        "state + entry.run - 1",
        "state",
        (EARLY_DRAFTS,),
    ),
)
