"""Recognises disk errors, also in what pip and Rust's libraries report, and says what to do about them."""

import errno
import os
import re

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)

# Python reports "[Errno 28] No space left on device", Rust's libraries "No space left on device (os error 28)".
_REPORTED = re.compile(r"\[Errno (\d+)\]([^\[]*)|\(os error (\d+)\)")


def disk_fault(error: BaseException) -> OSError | None:
    """Return the disk error that caused this one; None if the disk is not the cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _DISK_ERRORS:
            return cause if _is_of_a_file(cause.errno, str(cause)) else None
        if (fault := reported_disk_fault(str(cause))) is not None:
            return fault
        cause = cause.__cause__ or cause.__context__
    return None


def reported_disk_fault(output: str) -> OSError | None:
    """Return the disk error that a tool's output reports; None if it reports none."""
    for match in _REPORTED.finditer(output):
        number = int(match[1] or match[3])
        if number in _DISK_ERRORS and _is_of_a_file(number, match[2] or ""):
            return OSError(number, os.strerror(number))
    return None


def advice(error: OSError) -> str:
    """Return what a user can do about a disk error, for an error message."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "make room"
    return "give yourself the right to write there"


def _is_of_a_file(number: int, text: str) -> bool:
    """Return whether the error concerns a file. A refused connection also has EACCES, but its text names no file."""
    return number != errno.EACCES or "'" in text
