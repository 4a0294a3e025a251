"""Defects of waits: for draft nodes, for prompts of siblings, for levels that a head is sure of."""

from catalogue import UNIT, Mutant

REMOTE = f"{UNIT}/cluster/test_remote.py"
WAITING = f"{UNIT}/cluster/test_waiting.py"
PROSPECTS = "cluster/remote/prospects.py"
DRAFTER = "cluster/remote/drafter.py"

WAIT_MUTANTS = (
    Mutant(
        96,
        "a first level has its whole time again whenever somebody looks",
        PROSPECTS,
        "late_after - (now - pairing.asked_at)",
        "late_after",
        (f"{WAITING}::test_a_first_level_is_late_by_the_time_since_it_was_asked_for",),
    ),
    Mutant(
        96,
        "what is overdue is expected at once",
        PROSPECTS,
        "_OVERDUE = 0.25",
        "_OVERDUE = 0.0",
        (f"{WAITING}::test_what_should_be_there_already_is_expected_soon_but_not_at_once",),
    ),
    Mutant(
        96,
        "more levels are wanted than may be verified",
        PROSPECTS,
        "min(ask.max_depth, ask.max_nodes)",
        "ask.max_depth",
        (f"{WAITING}::test_levels_are_wanted_as_far_as_depth_and_nodes_both_reach",),
    ),
    Mutant(
        96,
        "more levels are wanted than were asked for",
        PROSPECTS,
        "min(ask.max_depth, ask.max_nodes)",
        "ask.max_nodes",
        (f"{WAITING}::test_levels_are_wanted_as_far_as_depth_and_nodes_both_reach",),
    ),
    Mutant(
        96,
        "a node in the shadow costs waits",
        PROSPECTS,
        " and peer.estimates.judged >= shadow",
        "",
        (f"{REMOTE}::test_a_node_that_joins_is_compared_before_it_is_used_or_waited_for",),
    ),
    Mutant(
        96,
        "a wait in vain is forgotten",
        DRAFTER,
        "                pairing.peer.waited_in_vain = True\n",
        "",
        (f"{REMOTE}::test_a_chain_that_stops_growing_is_waited_for_once_until_something_is_heard",),
    ),
    Mutant(
        96,
        "a wait in vain is never forgotten",
        DRAFTER,
        "        peer.waited_in_vain = False\n",
        "",
        (f"{REMOTE}::test_a_chain_that_stops_growing_is_waited_for_once_until_something_is_heard",),
    ),
    Mutant(
        96,
        "a pass that had no time to wait has waited in vain",
        DRAFTER,
        "            if seconds <= 0:\n",
        "            if seconds <= 0:\n                self._waited_in_vain(pairs, now)\n",
        (f"{REMOTE}::test_a_pass_that_had_no_time_to_wait_has_not_waited_in_vain",),
    ),
    Mutant(
        96,
        "what a node was told before it guessed speaks for it",
        "cluster/remote/pairing.py",
        "guessed = guessed.rebase(tokens[:before])",
        "pass",
        (f"{REMOTE}::test_what_a_node_was_told_before_it_guessed_does_not_speak_for_it",),
    ),
    Mutant(
        96,
        "prompts are kept for those who are gone",
        "engine/stepping/kept_prompts.py",
        "            for leader in self._kept.keys() - wanted:\n",
        "            for leader in ():\n",
        ("tests/integration/test_many_answers.py::test_a_prompt_is_not_kept_for_those_who_are_gone",),
    ),
    Mutant(
        96,
        "prompts are kept though all siblings run",
        "engine/stepping/scheduler.py",
        "        self._admit()\n        self.kept_prompts.forget_unwanted(self.waiting)\n",
        "        self._admit()\n",
        (
            "tests/integration/test_many_answers.py::test_the_prompt_is_computed_once_where_the_first_ends_at_once",
        ),
    ),
    Mutant(
        96,
        "a drafter that nobody asks becomes as dear as steps do",
        "speculation/measured/costs.py",
        "min(max(slower, 1 / MOST_PACE), MOST_PACE)",
        "max(slower, 1 / MOST_PACE)",
        (f"{UNIT}/speculation/test_situation.py",),
    ),
    Mutant(
        96,
        "a drafter that nobody asks becomes as cheap as steps do",
        "speculation/measured/costs.py",
        "min(max(slower, 1 / MOST_PACE), MOST_PACE)",
        "min(slower, MOST_PACE)",
        (f"{UNIT}/speculation/test_situation.py",),
    ),
    Mutant(
        96,
        "what drafters cost jumps when the pace begins anew",
        "speculation/measured/costs.py",
        "self._paces = {method: pace / self._pace for method, pace in self._paces.items()}",
        "self._paces = {}",
        (f"{UNIT}/speculation/test_situation.py",),
    ),
    Mutant(
        96,
        "a tree ends where the head is unsure behind one of its branches",
        "drafters/heads/dspark.py",
        "(sure >= self._confidence).any()",
        "(sure >= self._confidence).all()",
        (f"{UNIT}/drafters/test_dspark_trees.py",),
    ),
    Mutant(
        96,
        "draft nodes are added that do not earn what they cost",
        "cluster/pools/scaling.py",
        "worth = 0 if least >= 1 else full + (need - full > least)",
        "worth = full + (need - full > least)",
        (f"{UNIT}/cluster/test_scaling.py",),
    ),
    Mutant(
        96,
        "a member with bad input is started for ever",
        "cluster/pools/running.py",
        "        if code == REFUSED and not one.has_run:",
        "        if False:",
        (
            f"{UNIT}/cluster/test_pools.py::test_a_member_that_cannot_use_what_it_was_given_is_not_started_again",
        ),
    ),
)
