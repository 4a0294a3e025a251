"""Runs that say nothing of what the next ones take: something was compiled or captured in them."""

_runs = 0


def note_cold_run() -> None:
    """By whoever runs a pass of a kind that did not run before, or captures it."""
    global _runs  # noqa: PLW0603 - whoever asks has nothing to do with whoever runs
    _runs += 1


def cold_runs() -> int:
    """How many there were: if it has grown meanwhile, what was timed was one of them."""
    return _runs
