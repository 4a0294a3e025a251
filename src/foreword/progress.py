"""How long work tells how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, in all)."""

StageProgress = Callable[[str, int, int], None]
"""Called with (what is being done, done, in all)."""
