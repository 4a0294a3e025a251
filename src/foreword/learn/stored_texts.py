"""Stores served texts on disk for the next start, in one directory per tenant."""

import logging
import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote, unquote

from foreword.errors import RequestError
from foreword.learn.texts import KIND, ServedText
from foreword.train.texts.documents import Document, read_shards, require_written_by, write_shard

_log = logging.getLogger(__name__)

NO_TENANT = "-"  # name of the directory of a server without API keys


def store_texts(directory: Path, texts: Iterable[ServedText], model: str) -> None:
    """Replace the stored texts; raise `RequestError` if they cannot be written."""
    by_tenant: dict[str, list[ServedText]] = {}
    for text in texts:
        by_tenant.setdefault(text.tenant, []).append(text)
    new = _unfinished(directory)
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(mode=0o700, parents=True)
        for tenant, its_texts in by_tenant.items():
            folder = new / _folder(tenant)
            folder.mkdir(mode=0o700)
            # The kind of a stored text is its time.
            write_shard(folder, [replace(text.document, kind=repr(text.at)) for text in its_texts], model)
        if directory.exists():
            shutil.rmtree(directory)
        new.replace(directory)
    except OSError as error:
        raise RequestError(f"{directory} cannot be written: {error.strerror or error}") from None


def read_texts(directory: Path, model: str, takes_part: Callable[[str], bool]) -> list[ServedText]:
    """Return the stored texts, oldest first; those of a damaged file are left out, with a log line.

    Delete the texts of tenants that do not take part any more, and those of an interrupted `store_texts`.
    """
    shutil.rmtree(_unfinished(directory), ignore_errors=True)
    texts: list[ServedText] = []
    for folder in sorted(directory.iterdir()) if directory.is_dir() else ():
        name = unquote(folder.name)
        tenant = "" if name == NO_TENANT else name
        if not takes_part(tenant):
            shutil.rmtree(folder, ignore_errors=True)
            continue
        try:
            require_written_by(folder, model)
            texts += [_as_served(document, tenant) for document in read_shards(folder)]
        except (RequestError, ValueError) as error:
            _log.warning("stored texts are not used: %s", error)
    return sorted(texts, key=lambda text: text.at)


def _as_served(document: Document, tenant: str) -> ServedText:
    """Return a stored text; raise `ValueError` if its kind is not a time."""
    at = float(document.kind)
    if not math.isfinite(at):
        raise ValueError(f"{document.kind} is not a time")
    return ServedText(replace(document, kind=KIND), tenant, at)


def forget_stored(directory: Path, tenant: str) -> None:
    """Delete the stored texts of a tenant, also those of an interrupted `store_texts`."""
    for place in (directory, _unfinished(directory)):
        folder = place / _folder(tenant)
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            _log.error("%s cannot be deleted", folder)


def _unfinished(directory: Path) -> Path:
    """Return the directory in which `store_texts` writes before it replaces the earlier texts."""
    return directory.with_name(f".{directory.name}")


def _folder(tenant: str) -> str:
    # A tenant that is named like the directory without tenants gets another name.
    return quote(tenant, safe="").replace("-", "%2D").replace(".", "%2E") or NO_TENANT
