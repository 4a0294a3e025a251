"""`foreword serve` in a process of its own, with a fake engine in yet another."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx

from helpers.waiting import PATIENCE, wait_until
from helpers.warm_process import Forked, warm

TESTS = Path(__file__).parents[1]


@dataclass
class ServeProcess:
    process: "subprocess.Popen[str] | Forked"
    url: str
    ready_line: str

    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, verify=False)

    def engine_pid(self) -> int | None:
        """The engine's process: the only child of the server."""
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()
        return int(children[0]) if children else None

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)


@contextmanager
def serve(
    model: Path | str,
    *options: str,
    factory: str | None = "load_slow_fake",
    log: IO[str] | None = None,
    files: int | None = None,
    fresh: bool = False,
) -> Iterator[ServeProcess]:
    """Start the command and wait for its line; killed at the end if it still runs. `files` it may have open at once.

    It is forked from a warm process, and its engine from it, unless it is to be `fresh`.
    """
    fake = () if factory is None else ("--engine-factory", f"helpers.fake_engine:{factory}")
    with started(
        "serve", str(model), "--port", "0", *fake, *options, log=log, files=files, fresh=fresh
    ) as run:
        process, output = run
        line = output.readline()
        url = next((word for word in line.split() if word.startswith("http://")), "")
        yield ServeProcess(process, url, line)


@contextmanager
def started(
    *arguments: str, log: IO[str] | None = None, files: int | None = None, fresh: bool = False
) -> Iterator[tuple["subprocess.Popen[str] | Forked", IO[str]]]:
    """Run `foreword` with what it prints; killed at the end if it still runs."""
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    reading, writing = os.pipe()
    process: subprocess.Popen[str] | Forked
    with os.fdopen(reading) as output:
        with os.fdopen(writing, "w") as theirs:
            if fresh or files is not None or not warm.fits():
                command = [sys.executable, "-m", "foreword", *arguments]
                if files is not None:
                    command = ["sh", "-c", f'ulimit -n {files} && exec "$@"', "serve", *command]
                environment = os.environ | {"PYTHONPATH": paths}
                process = subprocess.Popen(command, stdout=theirs, stderr=log, text=True, env=environment)
            else:
                errors = 2 if log is None else log.fileno()
                with Path(os.devnull).open() as nothing:
                    streams = [nothing.fileno(), theirs.fileno(), errors]
                    process = warm.start(arguments, streams)
        try:
            yield process, output
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(30)


def wait_for_status(client: httpx.Client, path: str, status: int) -> None:
    """Ask until the answer has this status."""
    wait_until(lambda: client.get(path).status_code == status)


def idle_health(client: httpx.Client) -> dict[str, Any]:
    """What `/health` says once nothing runs and no page of KV is held."""
    health: dict[str, Any] = {}

    def is_idle() -> bool:
        health.update(client.get("/health").json())
        held = health["in_flight"], *(health["engine"][k] for k in ("running", "waiting", "kv_pages_used"))
        return not any(held)

    wait_until(is_idle)
    return health
