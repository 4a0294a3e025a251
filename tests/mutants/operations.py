"""Defects of what operators use: policy files, the simulator's goals, the drill, prompts and rows that join late."""

from catalogue import UNIT, Mutant

GRAPHS = f"{UNIT}/backends/cuda/test_graph_cache.py"
GOAL = f"{UNIT}/simulate/test_goal.py"
BODIES = f"{UNIT}/server/test_offline_bodies.py"
RULES = f"{UNIT}/control/policy_file/test_unreachable.py"

OPERATION_MUTANTS = (
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
