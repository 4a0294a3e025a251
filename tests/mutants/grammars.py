"""Defects of prescribed forms: states that move too early or stay, masks of other rows, guesses cut by their value."""

from catalogue import UNIT, Mutant

STATE = f"{UNIT}/structured/test_grammar_state.py"
COMPILER = f"{UNIT}/structured/test_grammar_compiler.py"
MASK = f"{UNIT}/acceptance/test_grammar_mask.py"
EXACT = "tests/statistical/test_grammar_exactness.py"
TEXTS = "tests/integration/test_structured_texts.py::test_a_random_model_writes_nothing_but_the_form"
DRAFTS = f"{UNIT}/speculation/test_within_grammar.py"
PREEMPTED = "tests/integration/test_structured_engine.py"
TOOLS = f"{UNIT}/server/test_tool_reading.py"
UNTAGGED = f"{UNIT}/server/test_untagged_calls.py"
LOADING = f"{UNIT}/backends/test_loading_memory.py"
FILL = "tests/integration/test_fill_in_the_middle.py"
SERVED = "tests/integration/test_server_structured.py"
COUNTS = f"{UNIT}/structured/test_counts.py"
TRIALS = f"{UNIT}/structured/test_compile_trials.py"
SLOW = f"{UNIT}/structured/test_slow_masks.py"
BUDGET = f"{UNIT}/structured/test_mask_budget.py"
DIALECTS = f"{UNIT}/structured/test_regex_dialects.py"
STATE_FILE = "structured/state.py"

GRAMMAR_MUTANTS = (
    Mutant(
        90,
        "the parser keeps what it has read ahead",
        STATE_FILE,
        "    def _take_back(self) -> None:\n        self._read(self._ahead, ())",
        "    def _take_back(self) -> None:\n        self._ahead = ()",
        (STATE, EXACT),
    ),
    Mutant(
        90,
        "tokens that could not be committed stay read",
        STATE_FILE,
        "                why = self._complaint()\n                self._start_again()\n",
        "                why = self._complaint()\n                self._ahead = ()\n",
        (f"{STATE}::test_a_token_that_cannot_come_changes_nothing",),
    ),
    Mutant(
        90,
        "answers to one prompt share a parser",
        "structured/compiling.py",
        "            return self._matcher.deep_copy()",
        "            return self._matcher",
        (f"{STATE}::test_answers_to_one_prompt_do_not_share_their_place",),
    ),
    Mutant(
        90,
        "all answers of a request have one state",
        "engine/requests/intake.py",
        "for index, form in enumerate(forms)",
        "for index, form in enumerate(forms[:1] * params.n)",
        (f"{PREEMPTED}::test_answers_to_one_prompt_have_states_of_their_own",),
    ),
    Mutant(
        90,
        "a preempted answer begins its form again",
        "engine/requests/request.py",
        "        self.kv = KvSequence()\n        self.ledger.preemptions += 1",
        "        self.kv = KvSequence()\n        if self.sampler.grammar is not None:\n"
        "            self.sampler.grammar.__init__(self.sampler.grammar._grammar)\n"
        "        self.ledger.preemptions += 1",
        (f"{PREEMPTED}::test_a_preempted_answer_goes_on_where_it_was",),
    ),
    Mutant(
        91,
        "every row has the mask of the text",
        "acceptance/pipeline/grammar_mask.py",
        "forbid(rows[first + place], row, room)",
        "forbid(rows[first + place], bits[0], room)",
        (MASK, EXACT),
    ),
    Mutant(
        91,
        "a node has the mask of the node before it instead of its parent's history",
        STATE_FILE,
        "found.append((*(found[parent] if parent >= 0 else ()), token))",
        "found.append((*(found[-1] if found else ()), token))",
        (STATE, EXACT),
    ),
    Mutant(
        91,
        "masks that were known before a commit are those of other places behind it",
        STATE_FILE,
        "if path[: len(came)] == came}",
        "if len(path) >= len(came)}",
        (STATE, EXACT),
    ),
    Mutant(
        92,
        "a drawn node is dropped because the form rules it out",
        "speculation/proposing.py",
        "        is_drawn = bool(draft.drawn) and draft.drawn[node] is not None",
        "        is_drawn = False",
        (f"{DRAFTS}::test_a_drawn_node_stays_whatever_its_token_is",),
    ),
    Mutant(
        92,
        "guesses that cannot come cost rows",
        "speculation/proposing.py",
        "known = within_grammar(known_tokens(draft.rebase(request.tokens), request), request)",
        "known = known_tokens(draft.rebase(request.tokens), request)",
        (f"{DRAFTS}::test_a_chosen_node_that_cannot_come_costs_no_row",),
    ),
    Mutant(
        92,
        "a draft model draws what the form rules out",
        "drafters/model/next_level.py",
        " or sampling.grammar is not None",
        "",
        (f"{DRAFTS}::test_what_is_drawn_is_drawn_from_what_may_come",),
    ),
    Mutant(
        93,
        "a call that a stop text cut is told as one that was made",
        "server/api/tools/writing.py",
        " and not reader.is_cut and",
        " and",
        (TOOLS,),
    ),
    Mutant(
        93,
        "what is cut of a call that had to be made is told as text",
        "server/api/tools/asking.py",
        'only_calls=self.choice == "required"',
        "only_calls=False",
        (TOOLS,),
    ),
    Mutant(
        93,
        "parameters that leave no token are the server's fault",
        "engine/requests/request.py",
        "self.fail(verdict.error, verdict.is_asked)",
        "self.fail(verdict.error)",
        (f"{SERVED}::test_what_cannot_be_had_is_refused_in_one_line",),
    ),
    Mutant(
        93,
        "only the first of the streamed answers has the prompt's log probabilities",
        "server/api/completions.py",
        "            known = self._known.get(prompt, ())",
        "            known = self._known.pop(prompt, ())",
        (f"{SERVED}::test_the_prompt_is_echoed_with_what_is_known_of_it",),
    ),
    Mutant(
        93,
        "an answer ends before its form is complete",
        "structured/compiling.py",
        "        if len(self.ends) > 1 and mask[first >> 5] >> (first & 31) & 1:",
        "        if len(self.ends) > 1:",
        (STATE,),
    ),
    Mutant(
        93,
        "any JSON with a tool's name is a call, whatever its arguments are",
        "server/api/tools/untagged.py",
        "return has_both and name is not None and takes(self._schemas[name], given)",
        "return has_both and name is not None",
        (UNTAGGED,),
    ),
    Mutant(
        93,
        "text that might have become a call is lost at the end of an answer",
        "server/api/tools/untagged.py",
        "            self._report()\n        self._release()\n",
        "            self._report()\n        self._held = []\n",
        (UNTAGGED,),
    ),
    Mutant(
        93,
        "a code block with a call and something else is a call",
        "server/api/tools/untagged.py",
        "self.is_over = not (self._fence or self._in_list or self.has_failed)",
        "self.is_over = not (self._in_list or self.has_failed)",
        (UNTAGGED,),
    ),
    Mutant(
        93,
        "a text that spells a fill-in-the-middle token forges it",
        "models/tokenization/fill_tokens.py",
        "for number in fill.ends if number in added and not added[number].special",
        "for number in ()",
        (f"{UNIT}/models/test_fill_tokens.py",),
    ),
    Mutant(
        93,
        "a filled gap does not end where another file would begin",
        "engine/requests/prompts.py",
        "if not suffix or tokenizer.fill is None or params.ignore_eos:",
        "if True:",
        (FILL,),
    ),
    Mutant(
        94,
        "the pages of a file stay in memory while a matrix is packed",
        "backends/weight_loader.py",
        "            yield piece\n            self._checkpoint.release()\n",
        "            yield piece\n",
        (LOADING,),
    ),
    Mutant(
        94,
        "a matrix is in float32 as a whole before it is packed",
        "backends/weight_loader.py",
        "step = max(1, _PIECE_ELEMENTS // expected[-1] // PANEL_ROWS) * PANEL_ROWS",
        "step = expected[0]",
        (LOADING,),
    ),
    Mutant(
        94,
        "counts of a schema reach the parser",
        "structured/compiler.py",
        "            check_counts(wanted)\n",
        "",
        (COUNTS,),
    ),
    Mutant(
        94,
        "a grammar is compiled in the engine without a trial",
        "structured/compiler.py",
        "        size = trials.run(wanted)\n",
        "        size = 0\n",
        (f"{TRIALS}::test_what_a_trial_refuses_is_never_compiled_here",),
    ),
    Mutant(
        94,
        "a trial has no limit on its processor time",
        "structured/trial_process.py",
        "    signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)\n",
        "",
        (f"{TRIALS}::test_a_grammar_that_takes_too_long_is_ended",),
    ),
    Mutant(
        94,
        "a slow mask is computed in the pass",
        STATE_FILE,
        "            self._is_slow = self._worker is not None\n",
        "            self._is_slow = False\n",
        (SLOW,),
    ),
    Mutant(
        94,
        "a request takes part in a pass before its mask is there",
        "engine/stepping/scheduler.py",
        " if request.sampler.is_ready]",
        "]",
        (f"{PREEMPTED}::test_others_go_on_while_a_slow_mask_is_computed_and_its_text_is_the_same",),
    ),
    Mutant(
        94,
        "the masks of a request cost its tenant nothing",
        "structured/budget.py",
        "        if not self._tenants.spend(self._tenant, more):",
        "        if False:",
        (BUDGET,),
    ),
    Mutant(
        94,
        "digits of all scripts are digits of a guided expression",
        "structured/grammars.py",
        "grammar_from_regex(with_ascii_classes(wanted.regex))",
        "grammar_from_regex(wanted.regex)",
        (DIALECTS,),
    ),
)
