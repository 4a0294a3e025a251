"""Downloads large files into the cache of the hub's library, and continues downloads that were cut off.

Version 2 of that library downloads such a file from the beginning. It uses complete files that are in its cache.
Therefore this module puts them there before the library is called.
"""

import fcntl
import hashlib
import re
import time
from pathlib import Path

from foreword.errors import ModelSourceError
from foreword.models.sources.fetching import append_download, file_digest
from foreword.progress import StageProgress

_ATTEMPTS = 5
"""Consecutive attempts without new bytes before a download fails."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


def store_blob(repository: str, name: str, progress: StageProgress) -> None:
    """Download a file of the hub into its cache and verify its checksum, unless it is there.

    Do nothing for small files, which have no SHA-256, or if the hub cannot be reached. Its library handles these cases.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import repo_folder_name

    try:
        metadata = get_hf_file_metadata(hf_hub_url(repository, name))
    except Exception:  # the library reports it, unless it has a cached copy
        return
    checksum = metadata.etag or ""
    if not _SHA256.fullmatch(checksum) or not metadata.size:
        return
    folder = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repository, repo_type="model") / "blobs"
    blob = folder / checksum
    if blob.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{checksum}.incomplete"  # the name that version 1 of the library continues, too
    with partial.open("ab") as lock:  # the partial file is also the lock between processes
        fcntl.flock(lock, fcntl.LOCK_EX)
        if blob.exists():  # another process has completed it
            partial.unlink(missing_ok=True)
            return
        address = hf_hub_url(
            repository, name, revision=metadata.commit_hash
        )  # the branch may change meanwhile
        _complete(address, f"{name} of {repository}", metadata.size, partial, progress)
        partial.replace(blob)


def repository_files(repository: str) -> list[str]:
    """Return the names of a repository's files; empty if the hub cannot be reached."""
    from huggingface_hub import model_info

    try:
        return [sibling.rfilename for sibling in model_info(repository).siblings or ()]
    except Exception:  # the library reports it, unless it has a cached copy
        return []


def _complete(address: str, name: str, size: int, partial: Path, progress: StageProgress) -> None:
    """Download the rest of a partial file and verify it; a file with a wrong checksum is downloaded once more."""
    checksum = partial.stem
    for _ in range(2):
        _append(address, name, size, partial, progress)
        if file_digest(partial, hashlib.sha256(), "verifying", progress) == checksum:
            return
        partial.write_bytes(b"")
    partial.unlink()
    raise ModelSourceError(f"{name} has a wrong checksum and was removed; connect to the hub and try again")


def _append(address: str, name: str, size: int, partial: Path, progress: StageProgress) -> None:
    """Download the rest of a partial file; after attempts without new bytes, wait ever longer, and then fail."""
    import httpx2
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers()
    attempts = _ATTEMPTS
    while (done := partial.stat().st_size) < size:
        try:
            append_download(
                address, partial, lambda new: progress("downloading", min(new, size), size), headers
            )
            reason = "the connection was closed"
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = type(error).__name__
        now = partial.stat().st_size
        attempts = _ATTEMPTS if now > done else attempts - 1
        if not attempts:
            raise ModelSourceError(
                f"{name}: the download broke off after {now} of {size} bytes ({reason}); "
                "the same command continues it"
            )
        if now < size:
            time.sleep(_ATTEMPTS - attempts)
