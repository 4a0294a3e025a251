"""Engines that Foreword is compared with: their modes, their versions and their servers."""

import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep

import foreword
from foreword import __version__
from foreword.bench.peers import LOOKUP_TOKENS, VLLM_DRAFT_TOKENS
from foreword.errors import RequestError

OURS, PLAIN = "foreword", "plain"


@dataclass(frozen=True)
class PeerKind:
    """An engine: implementation, package and modes, plain ones first."""

    path: str  # module:class of the `Peer`
    package: str  # required package
    distribution: str  # its distribution
    modes: Sequence[str]
    plain_modes: Sequence[str] = (PLAIN,)
    draft_mode: str | None = None  # mode with a draft model, if supported


KINDS = {
    OURS: PeerKind(
        "foreword.bench.peers:Ours",
        "foreword",
        "foreword",
        (PLAIN, "auto", "suffix+ngram"),
        draft_mode="draft_model",
    ),
    "llama.cpp": PeerKind(
        "foreword.bench.peers:LlamaCpp",
        "llama_cpp",
        "llama_cpp_python",
        ("stored", "Q8_0", "Q4_0", "stored lookup", "Q8_0 lookup", "Q4_0 lookup"),
        ("stored", "Q8_0", "Q4_0"),
    ),
    "transformers": PeerKind(
        "foreword.bench.peers:Transformers",
        "transformers",
        "transformers",
        (PLAIN, "prompt lookup"),
        draft_mode="assisted",
    ),
    "vllm": PeerKind("foreword.bench.peers:Vllm", "vllm", "vllm", (PLAIN, "ngram")),
}


@dataclass(frozen=True)
class Contestant:
    """One engine in one mode, in its own process."""

    peer: str
    mode: str
    python: str | None = None  # interpreter; None: this one
    draft: str | None = None  # draft model's path, if the mode needs one

    @property
    def label(self) -> str:
        return f"{self.peer} {self.mode}"

    @property
    def is_plain(self) -> bool:
        return self.mode in KINDS[self.peer].plain_modes

    @property
    def plain_label(self) -> str:
        """Return the label of the same weights without speculation: `Q4_0` for `Q4_0 lookup`."""
        first = self.mode.partition(" ")[0]
        return f"{self.peer} {first if first in KINDS[self.peer].plain_modes else PLAIN}"


def contestants(
    wanted: Sequence[str] | None,
    pythons: dict[str, str],
    draft: str | None = None,
    modes: Sequence[str] | None = None,
) -> list[Contestant]:
    """Return Foreword and the wanted engines; by default those that are installed or have an interpreter.

    A draft model adds a mode to each engine that supports one. `modes` selects modes; None: all.
    """
    for name in (*(wanted or ()), *pythons):
        if name not in KINDS:
            raise RequestError(f"--peers: there is no {name!r}; there are {', '.join(KINDS)}")
    chosen = [name for name in KINDS if name == OURS or _is_wanted(name, wanted, pythons)]
    found = []
    for name in chosen:
        kind, python = KINDS[name], pythons.get(name)
        found += [Contestant(name, mode, python) for mode in kind.modes]
        if draft is not None and kind.draft_mode is not None:
            found.append(Contestant(name, kind.draft_mode, python, draft))
    known = [mode for name in chosen for mode in KINDS[name].modes]
    if unknown := [mode for mode in modes or () if mode not in known]:
        raise RequestError(f"--modes: no engine here has {unknown[0]!r}; there are {', '.join(known)}")
    return [one for one in found if modes is None or one.mode in modes or one.draft is not None]


def _is_wanted(name: str, wanted: Sequence[str] | None, pythons: dict[str, str]) -> bool:
    is_there = name in pythons or find_spec(KINDS[name].package) is not None
    if wanted is None:
        return is_there
    if name in wanted and not is_there:
        raise RequestError(f"--peers {name}: it is not installed; name an interpreter: --python {name}=PATH")
    return name in wanted


def engine_versions(chosen: Sequence[Contestant]) -> dict[str, str]:
    """Return the version of every engine, from its interpreter."""
    pythons = {one.peer: one.python or sys.executable for one in chosen if one.peer != OURS}
    return {OURS: __version__} | {
        name: _version(python, KINDS[name].distribution) for name, python in pythons.items()
    }


def _version(python: str, distribution: str) -> str:
    code = f"from importlib.metadata import version; print(version({distribution!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "of unknown version"


START_SECONDS = 600
"""Maximum start time of a server in seconds. vLLM compiles for minutes."""

NAME = "model"
"""Name of the model in every server except transformers', which uses the path."""

Arguments = Callable[[Path, int], list[str]]
"""Returns interpreter arguments that start a server, by model and threads."""


@dataclass(frozen=True)
class ServedEngine:
    """An engine's server, and how its speculation is enabled."""

    engine: str
    label: str  # column of the table
    arguments: Arguments
    speculation: Sequence[str] = ()  # further arguments; the plain reference server has none
    name: Callable[[Path], str] = lambda _: NAME  # of the model in requests


def _foreword(model: Path, threads: int) -> list[str]:
    return ["-m", "foreword", "serve", str(model), "--served-model-name", NAME]


def _llama_cpp(model: Path, threads: int) -> list[str]:
    fixed = ("--model_alias", NAME, "--n_ctx", "2048", "--n_threads", str(threads))
    return ["-m", "llama_cpp.server", "--model", str(model), *fixed]


def _transformers(model: Path, threads: int) -> list[str]:
    return [
        "-c",
        "from transformers.cli.transformers import main; main()",
        "serve",
        _transformers_name(model),
    ]


def _transformers_name(model: Path) -> str:
    return f"{model.parent}:{model.name}" if model.is_file() else str(model)


def _vllm(model: Path, threads: int) -> list[str]:
    # Half of a GPU, since the plain server runs concurrently.
    half = ("--gpu-memory-utilization", "0.45", "--max-model-len", "4096", "--served-model-name", NAME)
    return ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), *half]


_VLLM_NGRAM = {"method": "ngram", "num_speculative_tokens": VLLM_DRAFT_TOKENS, "prompt_lookup_max": 4}
_LOOKUP = ("--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", str(LOOKUP_TOKENS))

SERVED = (
    ServedEngine(OURS, "foreword", _foreword),
    ServedEngine("llama.cpp", "llama.cpp", _llama_cpp),
    ServedEngine("llama.cpp", "llama.cpp lookup", _llama_cpp, _LOOKUP),
    ServedEngine("transformers", "transformers", _transformers, name=_transformers_name),
    ServedEngine("vllm", "vLLM ngram", _vllm, ("--speculative-config", json.dumps(_VLLM_NGRAM))),
)


@contextmanager
def started(python: str, arguments: Sequence[str], name: str, threads: int) -> Iterator[str]:
    """Start a server on a free port; yield its address when its model answers requests."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = [python, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with TemporaryFile() as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=engine_environment(threads)
        )
        try:
            deadline = monotonic() + START_SECONDS
            while not _answers(url, name):
                if server.poll() is not None or monotonic() > deadline:
                    log.seek(0)
                    lines = log.read().decode(errors="replace").strip().splitlines() or ["it wrote nothing"]
                    raise RequestError(f"the server did not start: {lines[-1][:300]}")
                sleep(0.2)
            yield f"{url}/v1"
        finally:
            server.kill()
            server.wait(30)


def engine_environment(threads: int) -> Mapping[str, str]:
    """Return an engine's environment: threads, and the path of Foreword for other interpreters."""
    ours = str(Path(foreword.__file__).parents[1])
    path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
    threaded = dict.fromkeys(("OMP_NUM_THREADS", "FOREWORD_THREADS"), str(threads))
    return {**os.environ, **threaded, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}


def _answers(url: str, name: str) -> bool:
    """Return whether a server completes a text; some listen before they have loaded their model."""
    body = {"model": name, "prompt": "Hello", "max_tokens": 1}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=START_SECONDS):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def verdicts_of(
    served: ServedEngine, python: str | None, model: Path, threads: int, options: Sequence[str]
) -> dict[str, object]:
    """Return the result of `foreword prove --url --json` for an engine's server, or `absent` with a reason."""
    interpreter = python or sys.executable
    plain, name = served.arguments(model, threads), served.name(model)
    try:
        with started(interpreter, [*plain, *served.speculation], name, threads) as url:
            given = ["--url", url, "--model", name, *options]
            if not served.speculation:
                return _examined(given)
            with started(interpreter, plain, name, threads) as plain_url:
                return _examined([*given, "--plain-url", plain_url])
    except RequestError as error:
        return {"verdicts": [], "absent": [str(error)]}


def _examined(options: Sequence[str]) -> dict[str, object]:
    command = [sys.executable, "-m", "foreword", "prove", *options, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):  # 1: a claim was refuted
        raise RequestError(f"foreword prove ended with exit code {done.returncode}")
    found: dict[str, object] = json.loads(done.stdout)
    return found
