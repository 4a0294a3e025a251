"""Recognises disk errors, also in what pip and Rust's libraries report, and says what to do about them."""

import errno
import os
import re
from collections.abc import Iterator

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)

# Python reports "[Errno 28] No space left on device", Rust's libraries "No space left on device (os error 28)".
_REPORTED = re.compile(r"\[Errno (\d+)\]([^\[]*)|\(os error (\d+)\)")


def disk_fault(error: BaseException) -> OSError | None:
    """Return the disk error that caused this one; None if the disk is not the cause."""
    for cause in _causes(error):
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
            return cause if _is_of_a_file(cause.errno, str(cause)) else None
        if (found := reported_disk_fault(str(cause))) is not None:
            return found
    return None


def reported_disk_fault(output: str) -> OSError | None:
    """Return the disk error that a tool's output reports; None if it reports none."""
    for found in _REPORTED.finditer(output):
        number = int(found[1] or found[3])
        if number in _DISK_ERRORS and _is_of_a_file(number, found[2] or ""):
            return OSError(number, os.strerror(number))
    return None


def advice(error: OSError) -> str:
    """Return what a user can do about a disk error, for an error message."""
    return (
        "make room"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "give yourself the right to write there"
    )


def _is_of_a_file(number: int, text: str) -> bool:
    """Return whether the error concerns a file. EACCES is also that of a refused connection, which names no file."""
    return number != errno.EACCES or "'" in text


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that one, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
