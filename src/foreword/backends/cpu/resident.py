"""Gives memory back to the system that loading needed and answering does not."""

import ctypes
import mmap
import re
import sys
from functools import cache
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)")
_SMAPS = Path("/proc/self/smaps")
_OWN_PAGES = ("Anonymous:", "Swap:")
_LIBRARY = "libtorch"  # by far the largest libraries; most of what starting them reads is never read again


def release_unused() -> None:
    """Return free heap memory, and unmap the pages of torch's libraries; pages in use are mapped again when read.

    Does nothing where the system is not Linux with glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    libc.malloc_trim(0)
    for begin, end in _torch_mappings():
        libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


@cache
def _torch_mappings() -> tuple[tuple[int, int], ...]:
    """Return the address ranges of the libraries that hold nothing but what is in their files."""
    try:
        return file_mappings(_SMAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()


def file_mappings(smaps: str) -> tuple[tuple[int, int], ...]:
    """Return the library's read-only mappings without pages of the process's own, in memory or swapped out.

    Relocated pages are such: they could not be read from the file again.
    """
    mappings: dict[tuple[int, int], bool] = {}
    found: tuple[int, int] | None = None
    for line in smaps.splitlines():
        if (match := _MAPPING.fullmatch(line)) is not None:
            begin, end, access, name = match.groups()
            is_library = _LIBRARY in Path(name).name and "w" not in access
            found = (int(begin, 16), int(end, 16)) if is_library else None
        elif found is not None and line.startswith(_OWN_PAGES):
            mappings[found] = mappings.get(found, True) and line.split()[1] == "0"
    return tuple(place for place, is_unchanged in mappings.items() if is_unchanged)
