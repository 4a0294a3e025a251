"""Install a wheel into a fresh virtual environment and use it where there is no compiler.

    python scripts/check_wheel.py dist [--torch-index-url URL]

Inside, PATH has the environment alone: no gcc, cmake or make; the cache of models is empty. `foreword doctor` names
the kernels, `foreword run` fetches the default model and answers, `foreword demo` compares plain and speculative
texts, `foreword batch` answers a file, and a server gives one text by OpenAI's, Anthropic's and Ollama's routes.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ASKED = {"messages": [{"role": "user", "content": "Name three colours."}], "max_tokens": 8, "seed": 1}
ROUTES = {"/v1/chat/completions": ASKED, "/v1/messages": ASKED, "/api/chat": ASKED | {"stream": False}}
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "cmake", "make", "ninja")


def main() -> None:
    """Check one wheel."""
    options = argparse.ArgumentParser(description="Install a wheel into a fresh environment and use it.")
    options.add_argument("dist", type=Path, help="folder with the wheels; the one for this machine is taken")
    options.add_argument("--torch-index-url", help="index of torch's CPU builds")
    given = options.parse_args()
    torch = ("torch",) if given.torch_index_url is None else ("--index-url", given.torch_index_url, "torch")
    with tempfile.TemporaryDirectory() as folder:
        check(find_wheel(given.dist), torch, Path(folder))
    print(f"check_wheel: works on Python {sys.version.split()[0]}")


def find_wheel(dist: Path) -> Path:
    """Return the wheel for this machine and interpreter."""
    tags = "cp311-cp311" if sys.version_info[:2] == (3, 11) else "cp312-abi3"
    (wheel,) = dist.resolve().glob(f"foreword-*-{tags}-*{platform.machine()}.whl")
    return wheel


def check(wheel: Path, torch: tuple[str, ...], folder: Path) -> None:
    """Raise `CalledProcessError` or `AssertionError` where something does not work."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    programs = folder / "venv" / "bin"
    bare = {**os.environ, "PATH": str(programs), "FOREWORD_CACHE": str(folder / "cache")}
    bare.pop("PYTHONPATH", None)
    compilers = [name for name in COMPILERS if (programs / name).exists()]
    assert not compilers, f"the environment has {compilers}"

    def run(*command: str) -> str:
        program = [str(programs / command[0]), *command[1:]]
        print("+", " ".join(command), flush=True)
        return subprocess.run(
            program, env=bare, cwd=folder, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    constraints = ("-c", str(ROOT / "constraints.txt"))
    run("python", "-m", "pip", "install", "--quiet", *constraints, *torch)
    run("python", "-m", "pip", "install", "--quiet", *constraints, f"foreword[server] @ {wheel.as_uri()}")
    described = json.loads(run("foreword", "doctor", "--json").splitlines()[-1])
    assert described["backend"] in ("cpu", "cuda"), described
    assert described["instruction_set"] not in ("none", "portable"), described
    answer = run(
        "foreword", "run", "smollm2-135m", "Name three colours.", "--max-tokens", "16", "--seed", "1"
    )
    assert answer.strip(), "foreword run printed nothing"
    assert "identical" in run("foreword", "demo"), "the demo did not compare texts"
    run("foreword", "man", "man1")
    assert (folder / "man1" / "foreword-serve.1").exists()
    check_batch(run, folder)
    check_server(programs, bare, folder)


def check_batch(run: Callable[..., str], folder: Path) -> None:
    """Answer a file of requests."""
    lines = [
        {"custom_id": route, "method": "POST", "url": route, "body": {**body, "stream": False}}
        for route, body in ROUTES.items()
    ]
    (folder / "in.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    run("foreword", "batch", "in.jsonl", "out.jsonl", "--model", "smollm2-135m")
    answers = [json.loads(line) for line in (folder / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    texts = {text_of(answer["custom_id"], answer["response"]["body"]) for answer in answers}
    assert len(answers) == len(ROUTES) and len(texts) == 1 and all(texts), texts


def text_of(route: str, answer: dict[str, Any]) -> str:
    """Return the text of a route's answer."""
    if route == "/v1/messages":
        return str(answer["content"][0]["text"])
    message = answer["message"] if route == "/api/chat" else answer["choices"][0]["message"]
    return str(message["content"])


def check_server(programs: Path, environment: dict[str, str], folder: Path) -> None:
    """Start a server, send one request to each API, and end it with SIGTERM."""
    command = [str(programs / "foreword"), "serve", "smollm2-135m", "--port", "0"]
    print("+ foreword serve", flush=True)
    with subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = next(word for line in server.stdout for word in line.split() if word.startswith("http://"))
        texts = set()
        for route, body in ROUTES.items():
            request = urllib.request.Request(
                f"{url.rstrip('/,')}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            texts.add(text_of(route, json.load(urllib.request.urlopen(request))))
        assert len(texts) == 1 and all(texts), texts
        server.terminate()
    assert server.returncode == 0, f"the server ended with {server.returncode}"


if __name__ == "__main__":
    main()
