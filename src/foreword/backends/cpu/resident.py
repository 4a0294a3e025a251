"""Returns memory to the system that loading a model needs and running it does not."""

import ctypes
import mmap
import re
import sys
from functools import cache
from pathlib import Path

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+\s*(.*)")
_SMAPS = Path("/proc/self/smaps")
_PRIVATE_PAGES = ("Anonymous:", "Swap:")  # lines of smaps with the size of changed pages
_LIBRARY = "libtorch"  # the largest libraries; most of their pages are needed only by the import


def release_unused() -> None:
    """Return free heap memory and the pages of torch's libraries to the system, on Linux with glibc.

    The system reads a page from the library's file again when it is needed.
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
    """Return the address ranges of torch's libraries whose pages can be read from their files again."""
    try:
        return file_mappings(_SMAPS.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ()


def file_mappings(smaps: str) -> tuple[tuple[int, int], ...]:
    """Return the address ranges of torch's read-only mappings without changed pages.

    Changed pages, such as relocated ones, could not be read from the file again.
    """
    is_unchanged: dict[tuple[int, int], bool] = {}  # by address range
    current: tuple[int, int] | None = None  # range of the lines that follow; None: not of the library
    for line in smaps.splitlines():
        if (match := _MAPPING.fullmatch(line)) is not None:
            begin, end, access, name = match.groups()
            is_library = _LIBRARY in Path(name).name and "w" not in access
            current = (int(begin, 16), int(end, 16)) if is_library else None
        elif current is not None and line.startswith(_PRIVATE_PAGES):
            is_unchanged[current] = is_unchanged.get(current, True) and line.split()[1] == "0"
    return tuple(mapping for mapping, unchanged in is_unchanged.items() if unchanged)
