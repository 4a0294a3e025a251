"""Verifies files in the hub library's cache.

The library names a stored file by the hub's checksum (SHA-256 of a large file, git's SHA-1 of a small one), so that
damage is detected offline.
"""

import hashlib
import re
from pathlib import Path

from foreword.progress import StageProgress

_CHUNK = 2**20
_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def damaged_files(path: Path, progress: StageProgress) -> list[Path]:
    """Return the files at `path` in the hub's cache whose checksum is wrong."""
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_symlink() and not _is_intact(file, progress)]


def _is_intact(link: Path, progress: StageProgress) -> bool:
    stored = link.resolve()
    if not _CHECKSUM.fullmatch(stored.name):
        return True  # not a link of the library
    if not stored.exists():
        return False
    size, done = stored.stat().st_size, 0
    digest = hashlib.sha256() if len(stored.name) == 64 else hashlib.sha1(b"blob %d\0" % size)
    with stored.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"verifying {link.name}", done, size)
    return digest.hexdigest() == stored.name
