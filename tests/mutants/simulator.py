"""Defects of the simulator: fleets that look better or cheaper than they are."""

from catalogue import UNIT, Mutant

SIMULATE = f"{UNIT}/simulate"
FLEETS = f"{SIMULATE}/test_fleets.py"
CALIBRATION = f"{SIMULATE}/test_calibration.py"
CLOSED_FORMS = f"{SIMULATE}/test_closed_forms.py"
AGAINST = f"{SIMULATE}/test_against_cluster.py"

SIMULATOR_MUTANTS = (
    Mutant(
        95,
        "what a node guesses is there without the way",
        "simulate/chains.py",
        "Chains._advance",
        "np.maximum(now, self._ready) + trips",
        "np.maximum(now, self._ready)",
        (f"{AGAINST}::test_targets_with_a_node_are_as_fast_as_they_are_simulated",),
    ),
    Mutant(
        95,
        "a chain goes on whatever the target's own token is",
        "simulate/chains.py",
        "Chains.record_verdict",
        "right > used",
        "right >= used",
        (f"{AGAINST}::test_targets_with_a_node_are_as_fast_as_they_are_simulated",),
    ),
    Mutant(
        95,
        "a silent node is waited for at every pass",
        "simulate/chains.py",
        "Chains._start_time",
        "set(silent_nodes)",
        "set()",
        (f"{FLEETS}::test_a_node_that_hangs_is_waited_for_once_by_each_target",),
    ),
    Mutant(
        95,
        "requests stay with a node that is dead",
        "simulate/chains.py",
        "Chains._is_lost",
        "if node.is_dead or node.removed_at is not None:\n    return True",
        "",
        (f"{FLEETS}::test_requests_move_when_their_node_dies_and_the_others_keep_their_home",),
    ),
    Mutant(
        95,
        "draft nodes cost nothing",
        "simulate/world.py",
        "result_of",
        "seconds * len(tallies) * prices.target + 0.9 * node_seconds * prices.node",
        "seconds * len(tallies) * prices.target",
        (f"{FLEETS}::test_money_is_the_reserved_time_of_both_pools",),
    ),
    Mutant(
        95,
        "all kinds of work are like the first",
        "simulate/scenario.py",
        "Dice.__init__",
        "np.arange(requests) % len(kinds)",
        "np.zeros(requests, np.int64)",
        (f"{FLEETS}::test_kinds_of_work_are_dealt_out_in_turn",),
    ),
    Mutant(
        95,
        "a round that a node is in the middle of counts as part of its first level",
        "simulate/calibration.py",
        "with_link",
        "1.5 if runs_ahead else 1.0",
        "1.0",
        (f"{CALIBRATION}::test_a_link_gives_network_levels_and_the_engines_own_work",),
    ),
    Mutant(
        95,
        "a pass that ends after the simulated time counts",
        "simulate/target.py",
        "SimTarget.step",
        "end < scenario.seconds",
        "end >= 0",
        (f"{CLOSED_FORMS}::test_only_passes_that_end_in_the_simulated_time_count",),
    ),
    Mutant(
        95,
        "the next request comes at the rate of now, whenever that rate ends",
        "simulate/world.py",
        "World._next_arrival",
        "expected < most",
        "most > 0",
        (f"{FLEETS}::test_a_rate_begins_on_time_after_a_lower_one",),
    ),
)
