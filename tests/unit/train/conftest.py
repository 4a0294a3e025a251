"""What the tests of training share."""

from pathlib import Path

import pytest
import torch

import helpers.cuda  # noqa: F401 # it chooses the interpreter before the compiler of torch loads Triton
from foreword.models.formats.checkpoint import open_checkpoint
from foreword.train.passes.plain_target import PlainTarget
from foreword.train.texts.batches import EndlessBatch
from foreword.train.texts.documents import Document
from helpers.tiny_training import greedy_documents


@pytest.fixture(scope="session")
def target(tiny_model: Path) -> PlainTarget:
    return PlainTarget.load(open_checkpoint(tiny_model), torch.device("cpu"), torch.float32, compiled=False)


@pytest.fixture(scope="session")
def documents(target: PlainTarget) -> list[Document]:
    """Greedy answers of the tiny target."""
    return greedy_documents(EndlessBatch(target, rows=60, context=24, stop_ids=frozenset()))
