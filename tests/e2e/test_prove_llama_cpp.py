"""`foreword prove --url` against the server of llama-cpp-python, with and without its prompt lookup.

`FOREWORD_LLAMA_CPP_PYTHON` names an interpreter with `llama-cpp-python[server]` where this one has none.
"""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from foreword.proofs.server.claims import CHECKS
from foreword.proofs.server.client import Server
from foreword.proofs.server.context import LEAST_TOKENS, ClaimStatus, ClaimVerdict, ExaminationPlan
from foreword.proofs.server.examination import examine, prepare
from foreword.wire.openai_http import open_client
from helpers.waiting import wait_until

INTERPRETER = os.environ.get("FOREWORD_LLAMA_CPP_PYTHON", sys.executable)
PATIENCE = 3_600
"""Seconds for some hundred answers of 128 tokens on a busy machine."""

pytestmark = [pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(PATIENCE)]

# A stream is cut unless it is the last request to arrive: three of eight are streamed.
PLAN = ExaminationPlan("test", prompts=3, tokens=LEAST_TOKENS, at_once=8, draws=48, depth=4)
GREEDY = "greedy with and without speculation"
PROMPT_LOOKUP = ("--draft_model", "prompt-lookup-decoding", "--draft_model_num_pred_tokens", "10")


@pytest.fixture(scope="module")
def interpreter() -> str:
    found = subprocess.run(
        [INTERPRETER, "-c", "import llama_cpp.server.app"], capture_output=True, check=False
    )
    if found.returncode != 0:
        pytest.skip("llama_cpp is not installed: pip install 'llama-cpp-python[server]'")
    return INTERPRETER


@contextmanager
def llama_cpp_server(interpreter: str, model: Path, log: Path, *options: str) -> Iterator[str]:
    """Start the server on a free port and yield its address once it lists its model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    fixed = ("--host", "127.0.0.1", "--port", str(port), "--model_alias", "model", "--n_ctx", "1024")
    command = [interpreter, "-m", "llama_cpp.server", "--model", str(model), *fixed, *options]
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        assert process.poll() is None, log.read_text("utf-8")[-2_000:]
        try:
            return httpx.get(f"{url}/v1/models", timeout=60).status_code == 200
        except httpx.TransportError:
            return False

    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            wait_until(is_ready)
            yield url
        finally:
            process.kill()
            process.wait(30)


@pytest.fixture(scope="module")
def plain_url(
    interpreter: str, default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    log = tmp_path_factory.mktemp("plain") / "log"
    with llama_cpp_server(interpreter, default_model, log) as url:
        yield url


def examined(
    url: str, *claims: str, plain_url: str | None = None, tolerance: float = 0.05
) -> dict[str, ClaimVerdict]:
    """Return the verdicts of these claims alone: each is examined whatever became of the claims that it rests on."""

    async def run() -> dict[str, ClaimVerdict]:
        async with open_client(url, None) as client, open_client(plain_url or url, None) as other:
            plain = None if plain_url is None else Server(other, "model")
            context = await prepare(Server(client, "model"), PLAN, plain, tolerance)
            checks = [check for check in CHECKS if check.name in claims]
            return {verdict.check: verdict async for verdict in examine(context, checks=checks)}

    return asyncio.run(run())


def test_a_default_penalty_refutes_nothing_and_cut_streams_are_a_verdict_of_their_own(plain_url):
    found = examined(plain_url, "seed in a batch", "logprobs", "penalties")
    assert found["logprobs"].outcome is ClaimStatus.HELD, found["logprobs"]
    assert found["penalties"].outcome in (ClaimStatus.HELD, ClaimStatus.NOT_TRIED), found["penalties"]
    batch = found["seed in a batch"]
    assert batch.outcome is ClaimStatus.FAILS_TOGETHER, batch
    assert batch.reproduction is not None
    assert any(body.get("stream") for body in batch.reproduction.bodies)


def test_prompt_lookup_that_changes_texts_is_not_said_to_hold(
    interpreter, default_model, plain_url, tmp_path
):
    with llama_cpp_server(interpreter, default_model, tmp_path / "log", *PROMPT_LOOKUP) as url:
        with_ties = examined(url, GREEDY, plain_url=plain_url)[GREEDY]
        strict = examined(url, GREEDY, plain_url=plain_url, tolerance=0.0)[GREEDY]
    assert with_ties.outcome in (ClaimStatus.DIFFERS_AT_TIES, ClaimStatus.REFUTED), with_ties
    assert strict.outcome is ClaimStatus.REFUTED, strict
    assert strict.extent.tokens == LEAST_TOKENS
