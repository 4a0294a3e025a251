"""Starts the servers of all engines of the scoreboard, and runs `foreword prove --url` on them."""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from typing import Any

import httpx2

from foreword.bench.contestants import OURS, engine_environment
from foreword.bench.peers import LOOKUP_TOKENS, VLLM_DRAFT_TOKENS
from foreword.bench.skeleton import command_json
from foreword.errors import RequestError

START_SECONDS = 600  # Maximum start time of a server in seconds. vLLM compiles for minutes.
PROVE_EXIT_CODES = (0, 1)  # of `foreword prove` with a result; 1: a claim was refuted
NAME = "model"  # name of the model in every server except transformers', which uses the path


@dataclass(frozen=True)
class ServedEngine:
    """The command that starts an engine's server, with and without speculation."""

    engine: str
    label: str  # heading of its column in the scoreboard
    arguments: Sequence[str]  # of the interpreter; {model}, {name} and {threads} are filled in
    speculation: Sequence[str] = ()  # further arguments, which the plain reference server does not get
    name: Callable[[Path], str] = lambda _: NAME  # returns the model's name in requests


def _transformers_name(model: Path) -> str:
    return f"{model.parent}:{model.name}" if model.is_file() else str(model)


_FOREWORD = ("-m", "foreword", "serve", "{model}", "--served-model-name", "{name}")
_LLAMA_CPP = (
    *("-m", "llama_cpp.server", "--model", "{model}", "--model_alias", "{name}"),
    *("--n_ctx", "2048", "--n_threads", "{threads}"),
)
_LOOKUP = ("--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", str(LOOKUP_TOKENS))
_TRANSFORMERS = ("-c", "from transformers.cli.transformers import main; main()", "serve", "{name}")
_VLLM = (
    *("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--served-model-name", "{name}"),
    # Half of a GPU, since the plain server runs concurrently.
    *("--gpu-memory-utilization", "0.45", "--max-model-len", "4096"),
)
_VLLM_NGRAM = {"method": "ngram", "num_speculative_tokens": VLLM_DRAFT_TOKENS, "prompt_lookup_max": 4}

SERVED = (
    ServedEngine(OURS, "foreword", _FOREWORD),
    ServedEngine("llama.cpp", "llama.cpp", _LLAMA_CPP),
    ServedEngine("llama.cpp", "llama.cpp lookup", _LLAMA_CPP, _LOOKUP),
    ServedEngine("transformers", "transformers", _TRANSFORMERS, name=_transformers_name),
    ServedEngine("vllm", "vLLM ngram", _VLLM, ("--speculative-config", json.dumps(_VLLM_NGRAM))),
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


def _answers(url: str, name: str) -> bool:
    """Return whether a server completes a text; some listen before they have loaded their model."""
    body = {"model": name, "prompt": "Hello", "max_tokens": 1}
    try:
        return httpx2.post(f"{url}/v1/completions", json=body, timeout=START_SECONDS).is_success
    except httpx2.HTTPError:
        return False


def prove_server(
    engine: ServedEngine, python: str | None, model: Path, threads: int, options: Sequence[str]
) -> dict[str, Any]:
    """Return the result of `foreword prove --url --json` on an engine's server; on failure the reason as `absent`."""
    interpreter, name = python or sys.executable, engine.name(model)
    plain = [part.format(model=model, name=name, threads=threads) for part in engine.arguments]
    try:
        with started(interpreter, [*plain, *engine.speculation], name, threads) as url:
            given = ["--url", url, "--model", name, *options]
            if not engine.speculation:
                return command_json("prove", given, PROVE_EXIT_CODES)
            with started(interpreter, plain, name, threads) as plain_url:
                return command_json("prove", [*given, "--plain-url", plain_url], PROVE_EXIT_CODES)
    except RequestError as error:
        return {"verdicts": [], "absent": [str(error)]}
