"""A server on a real port with a real engine in the same process."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine
from foreword.server.settings import ServerSettings
from helpers.local_server import LocalServer, local_server


def with_context(model: Path, folder: Path, tokens: int) -> Path:
    """A copy of a model whose context holds so many tokens."""
    copy = shutil.copytree(model, folder / "model")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": tokens}))
    return copy


@contextmanager
def real_server(model: Path, settings: ServerSettings) -> Iterator[LocalServer]:
    """Serve a model, drafting by ngrams, until the block ends."""
    engine = Engine.load(
        str(model),
        dtype="float32",
        device="cpu",
        speculation={"method": "ngram", "num_speculative_tokens": 4, "fixed": True},
        config=EngineConfig(kv_cache_memory_bytes=1 << 24),
    )
    engine.drafting = True  # type: ignore[attr-defined] - what the local server asks of a pretended one
    try:
        with local_server(model, settings, engine) as running:  # type: ignore[arg-type]
            yield running
    finally:
        engine.close()
