"""Defects of what operators use: policy files, the simulator's goals, the drill, prompts and rows that join late."""

from catalogue import UNIT, Mutant

GRAPHS = f"{UNIT}/backends/cuda/test_graph_cache.py"
EXTRA = f"{UNIT}/kv/test_extra_rows.py"
FAIRNESS = f"{UNIT}/control/test_fairness.py"
READING = f"{FAIRNESS}::test_a_step_that_reads_prompts_has_its_own_share_within_the_limit_of_its_requests"
GOAL = f"{UNIT}/simulate/test_goal.py"
BODIES = f"{UNIT}/server/test_offline_bodies.py"
RULES = f"{UNIT}/control/policy_file/test_unreachable.py"

OPERATION_MUTANTS = (
    Mutant(
        120,
        "drafts of a step that reads prompts exceed the limit of its requests",
        "control/fair_share.py",
        "FairShare._affordable",
        "min(share, room)",
        "share",
        (READING,),
    ),
    Mutant(
        120,
        "a step that reads prompts spends what others have saved",
        "control/fair_share.py",
        "FairShare.plan",
        "rows > len(entries)",
        "False",
        (READING,),
    ),
    Mutant(
        120,
        "the target's own token of a pass is left out of the least time of an answer",
        "engine/scheduling/order.py",
        "least_seconds",
        "1 + plan.max_depth",
        "plan.max_depth",
        (f"{UNIT}/engine/scheduling/test_deadlines.py",),
    ),
    Mutant(
        120,
        "the prompt of an aborted answer is kept for its siblings",
        "engine/scheduling/kept_prompts.py",
        "KeptPrompts.keep",
        "leader.finish_reason in _ENDED_WELL and leader.params.n > 1 and "
        "any((request.queued.leader is leader for request in waiting)) and (leader.kv.computed >= rows > 0) and self._cache.can_fork(leader.kv, rows) and "
        "self._cache.available_pages",
        "any((request.queued.leader is leader for request in waiting)) and leader.kv.computed >= rows > 0 and "
        "self._cache.can_fork(leader.kv, rows) and self._cache.available_pages",
        (
            "tests/integration/test_many_answers.py::test_a_prompt_is_not_kept_of_an_answer_that_did_not_end_by_itself",
        ),
    ),
    Mutant(
        120,
        "rows that are clipped before a late begin keep it",
        "kv/extra_rows.py",
        "ExtraRows.clip",
        "self.begin = min(self.begin, self.end)",
        "",
        (EXTRA,),
    ),
    Mutant(
        120,
        "rows of pages that end where late rows begin do not join them",
        "kv/extra_rows.py",
        "ExtraRows.adopt",
        "found >= self.begin",
        "found > self.begin",
        (EXTRA,),
    ),
    Mutant(
        120,
        "rows of pages join late rows although some between them are missing",
        "kv/extra_rows.py",
        "ExtraRows.adopt",
        "found >= self.begin",
        "found",
        (EXTRA,),
    ),
    Mutant(
        120,
        "late rows after those of pages are lost",
        "kv/extra_rows.py",
        "ExtraRows.adopt",
        "max(self.end, found)",
        "found",
        (EXTRA,),
    ),
    Mutant(
        120,
        "levels that a node leaves out do not change what is expected of it",
        "cluster/waiting.py",
        "NodeEstimates.filled",
        "self._survival = []",
        "",
        (f"{UNIT}/cluster/test_estimates.py",),
    ),
    Mutant(
        120,
        "an exit that joined late reads rows that it never filled",
        "backends/torch/head_factory.py",
        "TorchExit._logits",
        "seen_from(wanted, staged, seen, store.empty_slot)",
        "seen",
        ("tests/integration/test_exit_rows.py::test_an_exit_that_joined_late_does_not_read_the_rows_before",),
    ),
    Mutant(
        120,
        "policy explain does not check a body against the server's limits",
        "server/api/offline.py",
        "read_offline",
        "chosen.check(body, settings)",
        "",
        (BODIES,),
    ),
    Mutant(
        120,
        "the search for a fleet ends with one that misses the goal",
        "simulate/sweep.py",
        "_least",
        "reaches(middle)",
        "not reaches(middle)",
        (GOAL,),
    ),
    Mutant(
        120,
        "draft nodes do not grow with the targets of a goal",
        "simulate/sweep.py",
        "_Fleets._nodes",
        "math.ceil(count * self._scenario.fleet.nodes / self._scenario.fleet.targets)",
        "self._scenario.fleet.nodes",
        (GOAL,),
    ),
    Mutant(
        120,
        "a full cache of captured passes replaces the newest capture",
        "backends/cuda/graphs.py",
        "GraphCache._make_room",
        "iter",
        "reversed",
        (GRAPHS,),
    ),
    Mutant(
        120,
        "a capture is released while it may be running",
        "backends/cuda/graphs.py",
        "GraphCache._make_room",
        "torch.cuda.synchronize()",
        "",
        (GRAPHS,),
    ),
    Mutant(
        120,
        "a full cache captures at every run where one shape too many comes in turn",
        "backends/cuda/graphs.py",
        "GraphCache._make_room",
        "STALE_RUNS * self.limit",
        "0",
        (GRAPHS,),
    ),
    Mutant(
        120,
        "policy check compares each rule with single earlier rules alone",
        "control/policy_file/unreachable.py",
        "_takers",
        "left = rest\nif not left:\n    return takers",
        "if not rest:\n    return takers",
        (RULES,),
    ),
    Mutant(
        120,
        "a rule for prompts without tokens passes policy check",
        "control/policy_file/regions.py",
        "",
        "1",
        "0",
        (RULES,),
    ),
)
