"""How many kernels a GPU has to compile before one request at a time runs fast."""

import json
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


def test_one_request_at_a_time_needs_few_kernels(folder: Path):
    tests = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "helpers.kernel_variants", str(folder)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tests,
    )
    assert not found.returncode, found.stderr
    variants = json.loads(found.stdout)
    assert {"_linear", "_attend", "_take_level"} <= variants.keys()
    assert sum(variants.values()) <= MOST_VARIANTS, variants
