"""`foreword draft-node` and `foreword serve --drafters` as a user runs them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.command_line import assert_one_line_error, refusal
from helpers.serve_process import serve
from helpers.waiting import wait_until


def test_what_a_node_cannot_do_is_said_in_one_line(tiny_model: Path):
    model = ("--model", str(tiny_model))
    assert_one_line_error(
        refusal("draft-node", *model, "--method", "jacobi"),
        "jacobi cannot draft on a node",
        "the target samples",
    )
    assert_one_line_error(
        refusal("draft-node", *model, "--method", "eagle3"), "eagle3 cannot draft on a node", "hidden states"
    )
    assert_one_line_error(refusal("draft-node", *model, "--listen", "0.0.0.0:0"), "cluster token", "TLS")
    assert_one_line_error(refusal("draft-node", *model, "--labels", "row=3"), "labels are")
    assert_one_line_error(refusal("serve", *model[1:], "--drafters", "nowhere"), "HOST:PORT")
    assert_one_line_error(refusal("serve", *model[1:], "--local-tenants", "a"), "give --drafters too")


@pytest.mark.slow
def test_a_server_uses_a_node_survives_its_end_and_uses_the_next(tiny_model: Path, tmp_path: Path):
    socket_path = f"unix:{tmp_path}/node"
    command = [
        sys.executable,
        "-m",
        "foreword",
        "draft-node",
        "--model",
        str(tiny_model),
        "--listen",
        socket_path,
    ]
    ask = {"prompt": "the the the the", "max_tokens": 40, "temperature": 0, "seed": 1, "ignore_eos": True}

    def start_node() -> "subprocess.Popen[str]":
        node = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        assert node.stdout is not None
        assert "drafts on" in node.stdout.readline()
        return node

    node = start_node()
    try:
        with serve(tiny_model, "--drafters", socket_path, factory=None) as server, server.http() as http:

            def state() -> str:
                (told,) = http.get("/health").json()["draft_nodes"]
                return told["state"]

            def is_used() -> bool:
                http.post("/v1/completions", json=ask)
                return state() == "up"

            plain = http.post("/v1/completions", json={**ask, "speculation": False}).json()["choices"]
            wait_until(is_used)
            assert 'foreword:draft_node_up{model_name="' in http.get("/metrics").text
            node.send_signal(signal.SIGTERM)
            assert node.wait(60) == 0
            wait_until(lambda: state() == "down")
            assert http.post("/v1/completions", json=ask).json()["choices"] == plain
            node = start_node()
            wait_until(is_used)
            assert http.post("/v1/completions", json=ask).json()["choices"] == plain
    finally:
        node.kill()
        node.wait(30)
