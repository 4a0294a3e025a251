"""Our own server examined with every drafter that it has, and once in full."""

import json
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM
from foreword.drafters.names import OWN_METHODS
from helpers.command_line import foreword
from helpers.draft_nodes import asking, running_node
from helpers.drafted_answers import noisy_copy, store_of_answers
from helpers.serve_process import ServeProcess, serve

pytestmark = pytest.mark.slow

PATIENCE = 3_600
"""Seconds for 7,500 requests and what they take on a busy machine."""


@pytest.fixture(scope="module")
def paths(
    tiny_model: Path, tiny_heads: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What a method needs to be told beyond its name; `sparse_kv`, to draft for short texts."""
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")
    draft = noisy_copy(tiny_model, tmp_path_factory.mktemp("draft") / "model")
    store = store_of_answers(llm, tmp_path_factory.mktemp("datastore"))
    models = {"draft_model": draft, **tiny_heads}
    others: dict[str, dict[str, Any]] = {
        "rest": {"datastore": str(store)},
        "sparse_kv": {"sink_tokens": 3, "window_tokens": 8, "top_tokens": 0},
    }
    return {name: {"model": str(path)} for name, path in models.items()} | others


NOTHING_TO_GUESS = ("prediction", "grammar")
"""Methods that guess what a request expects or prescribes, which the examination's do not."""

GUESSES = "foreword:spec_decode_num_draft_tokens_total{"


def guesses(running: ServeProcess) -> float:
    """How many the server has had judged so far."""
    with running.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(GUESSES))


def refuted(model: Path, config: dict[str, Any], *options: str) -> list[str]:
    with serve(model, "--speculative-config", json.dumps(config), factory=None) as running:
        asked = ("prove", "--url", running.url, "--tolerance", "0.001", "--json", *options)
        run = foreword(*asked, timeout=PATIENCE)
        assert (guesses(running) > 0) == (config["method"] not in NOTHING_TO_GUESS)
    assert run.returncode in (0, 1), run.stderr
    found = json.loads(run.stdout)
    not_tried = {verdict["check"] for verdict in found["verdicts"] if verdict["verdict"] == "not tried"}
    assert not_tried <= {"penalties"}, found["verdicts"]  # not every text repeats a token
    refuted: list[str] = found["refuted"]
    return refuted


@pytest.mark.parametrize("method", [method for method in OWN_METHODS if method != "remote"])
def test_no_drafter_is_refuted(tiny_model, paths, method):
    config = {"method": method, "num_speculative_tokens": 4, "fixed": True, **paths.get(method, {})}
    if method == "layer_skip":
        config["exit_layer"] = 1
    assert refuted(tiny_model, config, "--small") == []


def test_a_draft_node_is_not_refuted(tiny_model):
    llm = LLM(str(tiny_model), dtype="float32", device="cpu", backend="cpu")
    with running_node(llm.loaded, {"method": "suffix"}) as node:
        assert refuted(tiny_model, asking(node.address), "--small") == []


@pytest.mark.timeout(PATIENCE)
def test_the_full_examination_refutes_nothing(tiny_model):
    config = {"method": "suffix", "num_speculative_tokens": 8, "fixed": True}
    assert refuted(tiny_model, config, "--full") == []
