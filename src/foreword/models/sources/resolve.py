"""Finds the files of a model that a user names: a path, a built-in model, or a model of the Hugging Face hub."""

import hashlib
import logging
import os
import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

from foreword.errors import ModelSourceError
from foreword.models.heads.shipped import head_named, shipped_heads
from foreword.models.sources.builtin import BUILTIN_MODELS, ModelEntry, find_builtin, pull
from foreword.models.sources.disk_errors import advice, disk_fault
from foreword.models.sources.fetching import file_digest
from foreword.models.sources.hub_blobs import repository_files, store_blob
from foreword.paths import user_path
from foreword.progress import StageProgress

_WEIGHTS = (".safetensors", ".gguf")


def cached_models(directory: Path | None = None) -> list[ModelEntry]:
    """Return the models with supported weights in the cache of the hub's library, sorted by name.

    `directory`: another directory with such a cache.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(directory).repos
    except (CacheNotFound, OSError, ValueError):
        return []
    entries = []
    for repository in repositories:
        newest = max(repository.revisions, key=lambda revision: revision.last_modified, default=None)
        if repository.repo_type != "model" or newest is None:
            continue
        names = [file.file_name for file in newest.files]
        if any(name.endswith(_WEIGHTS) for name in names):
            weights = "GGUF" if any(name.endswith(".gguf") for name in names) else "safetensors"
            path = Path(newest.snapshot_path)
            description = f"from the hub, {weights}"
            entries.append(ModelEntry(repository.repo_id, path, newest.size_on_disk, True, description))
    return sorted(entries, key=lambda entry: entry.name)


_HUB_ID = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+?)(?::(?P<file>[\w./-]+\.gguf))?", re.ASCII)
_WANTED_FILES = ["*.safetensors", "*.json", "*.txt", "*.jinja", "tokenizer.model"]
_UNWANTED_FILES = ["*/*", "consolidated*"]  # copies of the same weights in other formats


def resolve_model(name: str, *, on_progress: StageProgress | None = None) -> Path:
    """Return the `.gguf` file or directory of a model; download it if necessary.

    A name is that of a built-in model or head, an existing path, or a hub id: `org/name`, or `org/name:file.gguf` for
    one GGUF file. A built-in name takes precedence over a path; `./name` is always a path.
    """
    builtin = find_builtin(name)
    if builtin is not None:
        return builtin.path if builtin.is_present() else pull(name, on_progress)
    if (local := head_named(name) or _existing_path(name)) is not None:
        return local
    repository, file = _hub_names(name)
    path = _from_hub(repository, file, on_progress or (lambda *_: None))
    if file is None and not any(path.glob("*.safetensors")):
        raise _no_weights(repository)
    return path


def pull_model(name: str, on_progress: StageProgress) -> Path:
    """Download a model if necessary, verify the checksum of every file, and return its path.

    Files with a wrong checksum are removed and downloaded once more.
    """
    if find_builtin(name) is not None:
        return pull(name, on_progress)
    path = resolve_model(name, on_progress=on_progress)
    damaged = damaged_files(path, on_progress)
    for file in damaged:
        _stored(file).unlink(missing_ok=True)
        file.unlink()
    if damaged:
        path = _existing_path(name) or _from_hub(*_hub_names(name), on_progress)
        if not all(file.exists() for file in damaged) or damaged_files(path, on_progress):
            names = ", ".join(file.name for file in damaged)
            raise ModelSourceError(
                f"{names} of {name} has a wrong checksum and was removed; connect to the hub and try again"
            )
    return path


def local_model(name: str) -> Path | None:
    """Return the path of a model that is on this machine; never download."""
    builtin = find_builtin(name)
    if builtin is not None:
        return builtin.path if builtin.is_present() else None
    return _existing_path(name)


def check_name(name: str) -> None:
    """Raise `ModelSourceError` if a name cannot be that of a model; never download."""
    if find_builtin(name) is None and head_named(name) is None and _existing_path(name) is None:
        _hub_names(name)


def _existing_path(name: str) -> Path | None:
    path = user_path(name)
    # os.path.exists returns False for a string that cannot be a path, for which Path.exists may raise.
    return path if name and os.path.exists(path) else None  # noqa: PTH110


def _hub_names(name: str) -> tuple[str, str | None]:
    """Return (repository, file or None) of a hub id; raise `ModelSourceError` for any other text."""
    hub_id = None if name.startswith((".", "/", "~")) else _HUB_ID.fullmatch(name)
    if hub_id is None or hub_id["repository"].endswith(".gguf"):
        models = ", ".join(model.name for model in BUILTIN_MODELS)
        heads = ", ".join(head.name for head in shipped_heads())
        raise ModelSourceError(
            f"there is no model {name!r} here; give a .gguf file, a model directory, "
            f"a hub id (org/name) or a built-in name ({models}; of heads: {heads})"
        )
    return hub_id["repository"], hub_id["file"]


def _is_wanted(name: str) -> bool:
    is_unwanted = any(fnmatch(name, pattern) for pattern in _UNWANTED_FILES)
    return not is_unwanted and any(fnmatch(name, pattern) for pattern in _WANTED_FILES)


def _from_hub(repository: str, file: str | None, on_progress: StageProgress) -> Path:
    import huggingface_hub
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity(logging.ERROR)  # warnings about retries would hide our error message

    def download() -> str:
        if file is not None:
            store_blob(repository, file, on_progress)
            return huggingface_hub.hf_hub_download(repository, file)
        for name in filter(_is_wanted, repository_files(repository)):
            store_blob(repository, name, on_progress)
        return huggingface_hub.snapshot_download(
            repository, allow_patterns=_WANTED_FILES, ignore_patterns=_UNWANTED_FILES
        )

    return _download(repository, download)


def _no_weights(repository: str) -> ModelSourceError:
    """Return the error for a repository without safetensors; it names the repository's GGUF files, if any."""
    from huggingface_hub import list_repo_files

    try:
        files = [file for file in list_repo_files(repository) if file.endswith(".gguf")]
    except Exception:  # no network: the model is in the cache, which need not have all its files
        files = []
    advice_text = "weights in other formats are not read"
    if files:
        advice_text = f"give one of its GGUF files as {repository}:FILE: {', '.join(files)}"
    return ModelSourceError(f"{repository} has no .safetensors files; {advice_text}")


def _download(repository: str, download: Callable[[], object]) -> Path:
    """Return the path that `download` returns; raise `ModelSourceError` with the reason if it fails."""
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    try:
        return Path(str(download()))
    except ModelSourceError:
        raise
    except GatedRepoError:
        reason = "it needs its licence accepted on the hub and a login (hf auth login)"
    except RepositoryNotFoundError:
        reason = "there is no such repository, or it is private (hf auth login)"
    except FileNotFoundError:  # the hub's library raises it if there is neither a cached copy nor a network
        reason = "it cannot be reached and no copy is cached; connect, or give a local path"
    except EntryNotFoundError:
        reason = "the repository has no such file"
    except Exception as error:  # the hub's library passes on errors of its HTTP library
        if (fault := disk_fault(error)) is not None:
            raise _cache_fault(repository, fault) from None
        reason = f"{type(error).__name__}; connect and try again, or give a local path"
    raise ModelSourceError(
        f"there is no path {repository!r} here, and the hub's copy cannot be fetched: {reason}"
    ) from None


def _cache_fault(repository: str, fault: OSError) -> ModelSourceError:
    from huggingface_hub import constants

    return ModelSourceError(
        f"{repository} cannot be written to the hub's cache {constants.HF_HUB_CACHE}: {fault.strerror}; "
        f"{advice(fault)}, or set HF_HUB_CACHE to another directory"
    )


_CHECKSUM = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def damaged_files(path: Path, progress: StageProgress) -> list[Path]:
    """Return the files at `path` in the hub's cache whose checksum is wrong.

    The hub's library names a stored file by its checksum: SHA-256 for large files, git's SHA-1 for small ones.
    """
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [file for file in files if file.is_symlink() and not _is_intact(file, progress)]


def _stored(link: Path) -> Path:
    """Return the entry in a repository's `blobs` to which a link leads. The entry may itself link to a shared store."""
    while link.is_symlink() and not (link.parent.name == "blobs" and _CHECKSUM.fullmatch(link.name)):
        link = link.parent / link.readlink()
    return link


def _is_intact(link: Path, progress: StageProgress) -> bool:
    stored = _stored(link)
    if not _CHECKSUM.fullmatch(stored.name):
        return True  # the link was not made by the hub's library
    if not stored.exists():
        return False
    size = stored.stat().st_size
    digest = hashlib.sha256() if len(stored.name) == 64 else hashlib.sha1(b"blob %d\0" % size)
    return file_digest(stored, digest, f"verifying {link.name}", progress) == stored.name
