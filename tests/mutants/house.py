"""Defects at the seams: dropped drafts, passes under way, what drafters are told, who is billed."""

from catalogue import UNIT, Mutant

GUARD = f"{UNIT}/speculation/test_guarded_drafter.py"
WORLDS_AHEAD = "tests/integration/test_engine_model_check.py::test_worlds_with_steps_ahead"
OVERLAP = f"{UNIT}/speculation/test_overlap.py"
UNDER_WAY = f"{UNIT}/kv/test_passes_under_way.py"
SITUATION = f"{UNIT}/speculation/test_situation.py"
POOL = f"{UNIT}/engine/guessing/test_drafter_pool.py"
HEARD = f"{OVERLAP}::test_a_drafter_hears_every_committed_row_once_with_its_states"

HOUSE_MUTANTS = (
    Mutant(
        43,
        "a drawn node is dropped for the token that came out",
        "speculation/proposing.py",
        " if q is None else int(q.ids[-1]) < size",
        "",
        (f"{GUARD}::test_a_drawn_node_is_cut_for_its_q_and_never_for_its_token",),
    ),
    Mutant(
        43,
        "one bad node drops the whole draft",
        "speculation/proposing.py",
        "    return draft.keep(is_known)",
        "    return draft if all(map(is_known, range(len(draft)))) else NO_DRAFT",
        (f"{GUARD}::test_a_chain_is_cut_where_a_token_does_not_exist",),
    ),
    Mutant(
        43,
        "a rebased draft keeps the nodes of another branch",
        "speculation/draft.py",
        "            if self.parents[below] in kept:",
        "            if True:",
        (f"{UNIT}/speculation/test_draft.py",),
    ),
    Mutant(
        45,
        "pages of a request that failed with NaN stay published",
        "speculation/transaction.py",
        "            if verdict.poisoned:",
        "            if verdict.poisoned and not entry.run:",
        (f"{OVERLAP}::test_pages_of_a_request_that_failed_with_nan_are_never_found_again",),
    ),
    Mutant(
        47,
        "a drafter that is cancelled ends the engine",
        "drafters/guard/guarded.py",
        "        except BaseException as error:  # whatever",
        "        except Exception as error:  # whatever",
        (f"{GUARD}::test_nonsense_becomes_an_empty_draft_is_counted_and_logged_once",),
    ),
    Mutant(
        47,
        "ended requests live on in a drafter that hangs",
        "drafters/guard/guarded.py",
        "            bare = request.without_text()",
        "            bare = request",
        (f"{GUARD}::test_ended_requests_do_not_live_on_in_a_drafter_that_hangs",),
    ),
    Mutant(
        47,
        "a drafter that is late is asked again at once",
        "drafters/guard/caller_thread.py",
        " and self._clock() >= self._rests_until",
        "",
        (f"{GUARD}::test_a_drafter_that_is_late_again_and_again_is_asked_ever_less_often",),
    ),
    Mutant(
        48,
        "more launches for the same request than it has room for",
        "kv/paged_cache.py",
        "        if any(map(self.is_busy, sequences)):",
        "        if False:",
        (f"{OVERLAP}::test_a_third_step_for_the_same_request_is_refused_and_the_others_go_on",),
    ),
    Mutant(
        48,
        "how a pass with guesses ends is taken for known",
        "speculation/transaction.py",
        "            if not draft.parents:\n                entry.kv.foresee",
        "            if True:\n                entry.kv.foresee",
        (f"{OVERLAP}::test_a_step_with_guesses_is_followed_by_none_for_the_same_request",),
    ),
    Mutant(
        48,
        "a token that is still being drawn does not count towards the position of the next",
        "acceptance/batch.py",
        "        if any(pending):",
        "        if False:",
        (f"{OVERLAP}::test_a_step_that_is_launched_before_its_token_is_known_gives_the_same_text",),
    ),
    Mutant(
        48,
        "the step after one that failed is committed",
        "speculation/requests.py",
        "        return self.kv.losses == self.losses",
        "        return True",
        (f"{OVERLAP}::test_a_step_that_fails_takes_the_one_after_it_with_it",),
    ),
    Mutant(
        48,
        "a policy plans before it has learned what came of its last plan",
        "speculation/step.py",
        "        self._learn()  # a policy compares",
        "        pass  # a policy compares",
        ("tests/unit/engine/stepping/test_pipeline.py",),
    ),
    Mutant(
        48,
        "rows that a pass has made final are still expected",
        "kv/paged_cache.py",
        "        sequence.ahead = max(0, sequence.ahead - run)\n",
        "",
        (f"{UNDER_WAY}::test_a_foreseen_pass_can_be_followed_by_one_more",),
    ),
    Mutant(
        48,
        "a request whose history matters is followed before its token is known",
        "acceptance/request.py",
        "            and not self._counts_tokens\n            and not len(self.tail)\n",
        "",
        (f"{UNIT}/engine/stepping/test_lookout.py::test_who_can_be_followed",),
    ),
    Mutant(
        48,
        "moves under way count as done",
        "kv/row_moves.py",
        "        self._moving |= self._pending\n",
        "",
        (f"{UNDER_WAY}::test_moves_under_way_are_not_done_yet",),
    ),
    Mutant(
        50,
        "the hidden states of an accepted path are those of the nodes in order of the draft",
        "speculation/kept_states.py",
        "*(self.stop + node for node in self._path)]",
        "*(self.stop + place for place in range(len(self._path)))]",
        (HEARD,),
    ),
    Mutant(
        50,
        "the hidden states of another request",
        "speculation/observing.py",
        "                first += entry.run + len(draft)",
        "                first += 0",
        (f"{OVERLAP}::test_two_watched_requests_hear_of_their_own_rows",),
    ),
    Mutant(
        41,
        "a level counts as rejected though the one before it was",
        "speculation/measured/acceptance_stats.py",
        "lambda level, accepted: level <= accepted",
        "lambda level, accepted: True",
        (f"{SITUATION}::test_acceptance_is_counted_by_position",),
    ),
    Mutant(
        41,
        "the cost of a step is what launching it took",
        "speculation/measured/costs.py",
        "report.seconds.total - report.seconds.draft",
        "report.seconds.verify",
        (f"{SITUATION}::test_a_step_costs_its_whole_time_but_for_drafting",),
    ),
    Mutant(
        41,
        "drafting is billed to everyone by rows",
        "engine/requests/ledger.py",
        "self._draft += part.draft_seconds",
        "self._draft += rows * report.seconds.draft / report.rows",
        ("tests/integration/test_request_stats.py::test_drafting_is_billed_to_those_who_were_asked",),
    ),
)
