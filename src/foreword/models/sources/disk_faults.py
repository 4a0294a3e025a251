"""Tells faults of the local disk from faults of the network in what download tools report."""

import errno
import os
import re
from collections.abc import Iterator

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)

# Python writes "[Errno 28] No space left on device", Rust's libraries "No space left on device (os error 28)".
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
    """Return what a user can do about a disk error, as an imperative."""
    return (
        "make room"
        if error.errno in (errno.ENOSPC, errno.EDQUOT)
        else "give yourself the right to write there"
    )


def _is_of_a_file(number: int, text: str) -> bool:
    """Return False for a connection that was not permitted: such an error names no file."""
    return number != errno.EACCES or "'" in text


def _causes(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__
