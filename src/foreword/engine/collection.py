"""Garbage collection in processes that run an engine."""

import gc

YOUNG_OBJECTS = 20_000
"""Objects that are created and not freed between two collections.

A step of 128 requests creates thousands of objects, and frees as many. Python's default of 700 would collect several
times in every step, while the device waits.
"""


def spare_steps() -> None:
    """Make collections rare, and exclude all objects that exist by now."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
