"""The directory of a learner, which only one server at a time may use."""

import os
from collections.abc import Callable
from pathlib import Path

from foreword.errors import RequestError
from foreword.train.files import require_directory


def lock_directory(directory: Path) -> Callable[[], None]:
    """Create and lock the directory; return the function that unlocks it.

    Raise `RequestError` if it is in use or cannot be written to.

    The function may be called again, without effect. The operating system also unlocks it when the process ends.
    """
    import fcntl

    require_directory(directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise RequestError(
            f"{directory} cannot be written to: {error.strerror}; give another --learn-dir"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise RequestError(
            f"another server learns in {directory}; stop it or give another --learn-dir"
        ) from None

    def unlock() -> None:
        """Unlock the directory once: later, the descriptor may be another file's."""
        nonlocal descriptor
        if descriptor >= 0:
            os.close(descriptor)
            descriptor = -1

    return unlock
