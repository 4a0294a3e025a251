"""Models of the hub that are on this machine already."""

from pathlib import Path

from foreword.models.sources.builtin import ModelEntry

_WEIGHTS = (".safetensors", ".gguf")


def cached_models(directory: Path | None = None) -> list[ModelEntry]:
    """Those in the hub library's cache (or another) that hold weights of a kind that is read here, by name."""
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
            what = "hub, GGUF" if any(name.endswith(".gguf") for name in names) else "hub, safetensors"
            entries.append(
                ModelEntry(
                    repository.repo_id,
                    Path(newest.snapshot_path),
                    newest.size_on_disk,
                    True,
                    f"from the {what}",
                )
            )
    return sorted(entries, key=lambda entry: entry.name)
