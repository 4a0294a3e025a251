import hashlib
import logging
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import httpx2
import huggingface_hub
import pytest

from foreword.errors import ModelSourceError
from foreword.models.sources import hub_blobs, resolve
from foreword.models.sources.hub_blobs import store_blob
from foreword.models.sources.resolve import cached_models, pull_model


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


CONFIG, WEIGHTS = b"{}", bytes(range(256)) * 9000


def store(directory: Path) -> Path:
    """A snapshot as the hub's library keeps it: files named by the checksums that the hub gave."""
    blobs, snapshot = directory / "blobs", directory / "snapshots" / "a"
    blobs.mkdir(exist_ok=True)
    snapshot.mkdir(parents=True, exist_ok=True)
    checksums = {
        "config.json": (hashlib.sha1(b"blob 2\0" + CONFIG).hexdigest(), CONFIG),
        "model.safetensors": (hashlib.sha256(WEIGHTS).hexdigest(), WEIGHTS),
    }
    for name, (checksum, content) in checksums.items():
        if not (blobs / checksum).exists():
            (blobs / checksum).write_bytes(content)
        if not (snapshot / name).is_symlink():
            (snapshot / name).symlink_to(blobs / checksum)
    return snapshot


def test_a_pull_from_the_hub_verifies_every_file(tmp_path: Path, monkeypatch):
    snapshot = store(tmp_path)
    fetched, events = [], []

    def download(repository: str, **filters) -> str:
        fetched.append(repository)
        return str(store(tmp_path))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert pull_model("org/name", lambda *event: events.append(event)) == snapshot
    assert fetched == ["org/name"]
    assert ("verifying model.safetensors", len(WEIGHTS), len(WEIGHTS)) in events


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_file_is_fetched_again(tmp_path: Path, monkeypatch, name):
    snapshot = store(tmp_path)
    (snapshot / name).write_bytes(b"\1" + (snapshot / name).read_bytes()[1:])
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda repository, **filters: str(store(tmp_path))
    )
    assert pull_model("org/name", lambda *event: None) == snapshot
    assert (snapshot / "config.json").read_bytes() == CONFIG
    assert (snapshot / "model.safetensors").read_bytes() == WEIGHTS


def test_a_file_in_the_hubs_shared_store_is_verified_by_its_repositorys_name(tmp_path: Path, monkeypatch):
    """Version 2 of the library keeps such a file under another checksum, for all repositories."""
    snapshot = store(tmp_path)
    weights, shared = snapshot / "model.safetensors", tmp_path / "shared" / ("e" * 64)
    blob = weights.readlink()
    shared.parent.mkdir()
    blob.rename(shared)
    blob.symlink_to(shared)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **filters: str(snapshot))
    assert pull_model("org/name", lambda *event: None) == snapshot
    assert shared.exists()
    shared.write_bytes(b"short")
    with pytest.raises(ModelSourceError, match=r"model.safetensors of org/name has a wrong checksum"):
        pull_model("org/name", lambda *event: None)
    assert shared.exists()
    assert not blob.is_symlink()


def test_a_damaged_file_that_cannot_be_fetched_again_is_an_error(tmp_path: Path, monkeypatch):
    snapshot = store(tmp_path)
    (snapshot / "model.safetensors").write_bytes(b"short")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **filters: str(snapshot))
    with pytest.raises(ModelSourceError, match=r"model.safetensors of org/name has a wrong checksum"):
        pull_model("org/name", lambda *event: None)
    assert not (snapshot / "model.safetensors").exists()


class CutHub:
    """Sends a file, and breaks off after `sent` bytes of it as often as told; notes the ranges requested."""

    def __init__(self, content: bytes, *sent: int) -> None:
        self.content, self.sent, self.ranges = content, list(sent), []
        self.addresses, self.headers = set(), {}

    def metadata(self, address: str) -> SimpleNamespace:
        return SimpleNamespace(
            etag=hashlib.sha256(WEIGHTS).hexdigest(), size=len(WEIGHTS), commit_hash="c" * 40
        )

    @contextmanager
    def stream(self, method, address, headers, **settings):
        begin = int(headers["Range"].removeprefix("bytes=").removesuffix("-"))
        self.ranges.append(begin)
        self.addresses.add(address)
        self.headers = dict(headers)
        count = self.sent.pop(0) if self.sent else None

        def body():
            yield self.content[begin:][:count]
            if count is not None:
                raise httpx2.ReadError("cut off")

        yield httpx2.Response(206, content=body(), request=httpx2.Request(method, address))


@pytest.fixture
def cut_hub(tmp_path: Path, monkeypatch):
    def start(hub: CutHub) -> CutHub:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", hub.metadata)
        monkeypatch.setattr(httpx2, "stream", hub.stream)
        monkeypatch.setattr(hub_blobs.time, "sleep", lambda seconds: None)
        return hub

    return start


def stored(directory: Path) -> list[tuple[str, int]]:
    return [(file.suffix, file.stat().st_size) for file in directory.rglob("*") if file.is_file()]


def test_a_download_from_the_hub_that_broke_off_is_continued_by_the_next_run(tmp_path: Path, cut_hub):
    """huggingface_hub 2 would begin anew."""
    hub = cut_hub(CutHub(WEIGHTS, 1000, *[0] * 5))
    with pytest.raises(ModelSourceError, match=r"broke off after 1000 of 2304000 bytes \(ReadError\)"):
        store_blob("org/name", "model.gguf", lambda *event: None)
    assert hub.ranges == [0, *[1000] * 5]
    assert stored(tmp_path) == [(".incomplete", 1000)]
    hub = cut_hub(CutHub(WEIGHTS, 500))
    store_blob("org/name", "model.gguf", lambda *event: None)
    assert hub.ranges == [1000, 1500]
    (blob,) = tmp_path.glob("models--org--name/blobs/*")
    assert blob.read_bytes() == WEIGHTS
    store_blob("org/name", "model.gguf", lambda *event: None)
    assert len(hub.ranges) == 2


def test_a_download_names_the_commit_and_sends_the_token_only_if_it_may(tmp_path: Path, cut_hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    for switched_off in (False, True):
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", switched_off)
        hub = cut_hub(CutHub(WEIGHTS))
        store_blob("org/name", f"{switched_off}.gguf", lambda *event: None)
        assert ("hf_secret" in str(hub.headers)) is not switched_off
        (address,) = hub.addresses
        assert "c" * 40 in address
        for blob in tmp_path.glob("models--org--name/blobs/*"):
            blob.unlink()


def test_a_download_with_a_wrong_checksum_is_tried_once_more_and_not_kept(tmp_path: Path, cut_hub):
    hub = cut_hub(CutHub(WEIGHTS[::-1]))
    with pytest.raises(ModelSourceError, match=r"model.gguf of org/name has a wrong checksum"):
        store_blob("org/name", "model.gguf", lambda *event: None)
    assert hub.ranges == [0, 0]
    assert stored(tmp_path) == []


def test_all_files_of_a_repository_that_are_needed_are_stored_first(tmp_path: Path, monkeypatch):
    names = [
        "model.safetensors",
        "config.json",
        "original/model.safetensors",
        "consolidated.safetensors",
        "a.bin",
    ]
    stored = []
    monkeypatch.setattr(resolve, "repository_files", lambda repository: names)
    monkeypatch.setattr(resolve, "store_blob", lambda repository, name, progress: stored.append(name))
    snapshot = store(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **filters: str(snapshot))
    assert pull_model("org/name", lambda *event: None) == snapshot
    assert stored == ["model.safetensors", "config.json"]
    assert logging.getLogger("huggingface_hub").level == logging.ERROR
