"""Returns memory that was freed to the system."""

import ctypes
from functools import cache


def return_free_memory() -> None:
    """Return what the C library keeps of freed memory; takes some 10 ms. Only glibc keeps that much."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> "ctypes._NamedFuncPointer | None":
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
