"""Writes a file or directory under a temporary name, so that it exists only when it is complete."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from foreword.errors import RequestError


@contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Yield a temporary path next to `out`, and rename it to `out` at the end; after an error, leave nothing."""
    new_folders = [folder for folder in out.parents if not folder.exists()]  # deepest first
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary = tempfile.TemporaryDirectory(
            prefix=f".{out.name}.", dir=out.parent, ignore_cleanup_errors=True
        )
        with temporary as directory:
            yield Path(directory, out.name)
            Path(directory, out.name).rename(out)
    except BaseException as error:
        for folder in new_folders:
            with suppress(OSError):  # not empty, or never created
                folder.rmdir()
        if isinstance(error, OSError):
            raise RequestError(f"{out} cannot be written: {error.strerror or error}") from None
        raise
