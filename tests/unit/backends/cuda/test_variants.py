"""Which kernels a GPU has to compile before one request at a time runs fast, and that another process can do it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.cuda import needs_triton
from helpers.tiny_heads import TinyHead
from helpers.tiny_models import make_hf_model

pytestmark = needs_triton

MOST_VARIANTS = 45


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("variants")
    make_hf_model(folder / "target", num_hidden_layers=2, max_position_embeddings=4096)
    taps = [0, 1, 2]
    head = TinyHead(360, draft_vocab=201).eagle3()
    head.save(folder / "eagle3", draft_vocab_size=201, eagle_aux_hidden_state_layer_ids=taps)
    return folder


def run(program: str, argument: str, cache: Path) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", program, argument],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
        env={**os.environ, "TRITON_CACHE_DIR": str(cache)},
    )
    assert not found.returncode, found.stderr
    return found.stdout


def test_one_request_at_a_time_needs_few_kernels(folder: Path, tmp_path: Path):
    variants = json.loads(run("helpers.kernel_variants", str(folder), tmp_path))
    assert {"_linear", "_attend", "_take_level"} <= variants.keys()
    assert sum(variants.values()) <= MOST_VARIANTS, variants


def test_recorded_kernels_are_compiled_by_another_process(tmp_path: Path):
    run("helpers.recorded_kernels", "90", tmp_path)
