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
        "within=min(share, room))",
        "within=share)",
        (READING,),
    ),
    Mutant(
        120,
        "a step that reads prompts spends what others have saved",
        "control/fair_share.py",
        "self._reads = rows > len(entries)",
        "self._reads = False",
        (READING,),
    ),
    Mutant(
        120,
        "the target's own token of a pass is left out of the least time of an answer",
        "engine/service/deadlines.py",
        "1 + plan.max_depth",
        "plan.max_depth",
        (f"{UNIT}/engine/service/test_deadlines.py",),
    ),
    Mutant(
        120,
        "the prompt of an aborted answer is kept for its siblings",
        "engine/stepping/kept_prompts.py",
        "leader.finish_reason in _ENDED_WELL\n            and ",
        "",
        (
            "tests/integration/test_many_answers.py::test_a_prompt_is_not_kept_of_an_answer_that_did_not_end_by_itself",
        ),
    ),
    Mutant(
        120,
        "rows that are clipped before a late begin keep it",
        "kv/extra_rows.py",
        "        self.begin = min(self.begin, self.end)\n",
        "",
        (EXTRA,),
    ),
    Mutant(
        120,
        "rows of pages that end where late rows begin do not join them",
        "kv/extra_rows.py",
        "if found >= self.begin:",
        "if found > self.begin:",
        (EXTRA,),
    ),
    Mutant(
        120,
        "rows of pages join late rows although some between them are missing",
        "kv/extra_rows.py",
        "if found >= self.begin:",
        "if found:",
        (EXTRA,),
    ),
    Mutant(
        120,
        "late rows after those of pages are lost",
        "kv/extra_rows.py",
        "0, max(self.end, found)",
        "0, found",
        (EXTRA,),
    ),
    Mutant(
        120,
        "levels that a node leaves out do not change what is expected of it",
        "cluster/remote/estimates.py",
        "        self._survival = []\n        for level in range(min(wanted",
        "        for level in range(min(wanted",
        (f"{UNIT}/cluster/test_estimates.py",),
    ),
    Mutant(
        120,
        "an exit that joined late reads rows that it never filled",
        "backends/torch/decoder.py",
        "own_keys[0], own_values[0], slots, seen_from(wanted, staged, seen, store.empty_slot)",
        "own_keys[0], own_values[0], slots, seen",
        ("tests/integration/test_exit_rows.py::test_an_exit_that_joined_late_does_not_read_the_rows_before",),
    ),
    Mutant(
        120,
        "policy explain does not check a body against the server's limits",
        "server/api/offline.py",
        "        chosen.check(body, settings)\n",
        "",
        (BODIES,),
    ),
    Mutant(
        120,
        "the search for a fleet ends with one that misses the goal",
        "simulate/goal.py",
        "low, high = (low, middle) if reaches(middle) else (middle, high)",
        "low, high = (low, middle) if not reaches(middle) else (middle, high)",
        (GOAL,),
    ),
    Mutant(
        120,
        "draft nodes do not grow with the targets of a goal",
        "simulate/goal.py",
        "math.ceil(count * self._scenario.fleet.nodes / self._scenario.fleet.targets)",
        "self._scenario.fleet.nodes",
        (GOAL,),
    ),
    Mutant(
        120,
        "a full cache of captured passes replaces the newest capture",
        "backends/cuda/graphs.py",
        "oldest = next(iter(self._captured), None)",
        "oldest = next(reversed(self._captured), None)",
        (GRAPHS,),
    ),
    Mutant(
        120,
        "a capture is released while it may be running",
        "backends/cuda/graphs.py",
        "        torch.cuda.synchronize()  # its last replay may still be running\n",
        "",
        (GRAPHS,),
    ),
    Mutant(
        120,
        "a full cache captures at every run where one shape too many comes in turn",
        "backends/cuda/graphs.py",
        " <= STALE_RUNS * self.limit",
        " <= 0",
        (GRAPHS,),
    ),
    Mutant(
        120,
        "policy check compares each rule with single earlier rules alone",
        "control/policy_file/unreachable.py",
        "        left = rest\n        if not left:",
        "        if not rest:",
        (RULES,),
    ),
    Mutant(
        120,
        "a rule for prompts without tokens passes policy check",
        "control/policy_file/regions.py",
        '"prompt_tokens": 1}',
        '"prompt_tokens": 0}',
        (RULES,),
    ),
)
