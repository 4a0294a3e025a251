"""Prints the policy's own CPU time per step on simulated traffic, by batch: `python scripts/policy_time.py`."""

import sys
from pathlib import Path
from time import process_time
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from foreword.control.policy import MeasuredPolicy
from helpers.traffic import H200, TWO_CORES, Kind, Traffic, states_head

STEPS, WARM_UP = 1500, 400


class TimedPolicy:
    """Passes calls on to a policy and adds up their CPU time."""

    def __init__(self, policy: MeasuredPolicy) -> None:
        self._policy = policy
        self.seconds = dict.fromkeys(("plan", "trim", "learn"), 0.0)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the policy has
        method = getattr(self._policy, name)
        if name not in self.seconds:
            return method

        def timed(*arguments: object) -> object:
            began = process_time()
            result = method(*arguments)
            self.seconds[name] += process_time() - began
            return result

        return timed


def measure(name: str, traffic: Traffic) -> None:
    """Print the microseconds per step of each call."""
    timed: Any = TimedPolicy(MeasuredPolicy())
    for _ in range(WARM_UP):
        traffic.run(timed, 1)
    timed.seconds.update(dict.fromkeys(timed.seconds, 0.0))
    for _ in range(STEPS):
        traffic.run(timed, 1)
    parts = ", ".join(f"{part} {1e6 * seconds / STEPS:.0f}" for part, seconds in timed.seconds.items())
    print(f"{name}: {1e6 * sum(timed.seconds.values()) / STEPS:.0f} µs ({parts})")


def main() -> None:
    head = states_head(0.3e-3, code=Kind(0.8))
    for batch, curve in ((1, TWO_CORES), (8, H200), (32, H200)):
        measure(f"batch {batch}, a head in use", Traffic(curve, [head], batch, ("code",)))
    off = states_head(5e-3, code=Kind(0.2))
    for batch in (1, 8, 32):
        measure(f"batch {batch}, speculation off", Traffic(H200, [off], batch, ("code",)))


if __name__ == "__main__":
    main()
