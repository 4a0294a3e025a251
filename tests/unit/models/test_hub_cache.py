from pathlib import Path

from foreword.models.sources.resolve import cached_models


def cache(directory: Path, repository: str, *names: str) -> Path:
    """A repository as the hub's library keeps it."""
    root = directory / repository
    snapshot = root / "snapshots" / ("a" * 40)
    (root / "blobs").mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("a" * 40, encoding="ascii")
    snapshot.mkdir(parents=True)
    for number, name in enumerate(names):
        blob = root / "blobs" / str(number)
        blob.write_bytes(b"x" * 1000)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_cached_models_of_the_hub_are_listed(tmp_path: Path):
    second = cache(tmp_path, "models--org--second", "model.gguf")
    first = cache(tmp_path, "models--org--first", "config.json", "model.safetensors")
    cache(tmp_path, "models--org--pickled", "pytorch_model.bin")
    cache(tmp_path, "datasets--org--texts", "train.safetensors")
    found = cached_models(tmp_path)
    assert [(e.name, e.path, e.bytes, e.present) for e in found] == [
        ("org/first", first, 2000, True),
        ("org/second", second, 1000, True),
    ]
    assert [e.description for e in found] == ["from the hub, safetensors", "from the hub, GGUF"]
    assert cached_models(tmp_path / "nothing here") == []
