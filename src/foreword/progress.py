"""Progress callbacks of long operations."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with (done, total)."""

StageProgress = Callable[[str, int, int], None]
"""Called with (stage, done, total)."""
