"""Creates the engine in its process."""

from collections.abc import Callable

from foreword.engine.config import EngineConfig
from foreword.engine.core import EngineCore
from foreword.engine.engine import Engine
from foreword.engine.loader import LoadedModel
from foreword.progress import StageProgress
from foreword.wire.frames import Start


def load_engine(
    start: Start,
    on_stage: StageProgress,
    attach: Callable[[LoadedModel, EngineCore], None] = lambda loaded, core: None,
) -> Engine:
    """Load the model and start the engine's thread; `on_stage` reports progress.

    `attach` is called before the thread starts.
    """
    engine = Engine.load(
        start.model,
        dtype=start.dtype,
        device=start.device,
        backend=start.backend,
        quantization=start.quantization,
        kv_cache_dtype=start.kv_cache_dtype,
        tensor_parallel_size=start.tensor_parallel_size,
        speculation=start.speculation,  # None: off; the API process has resolved "auto"
        config=EngineConfig(**start.config),
        attach=attach,
        progress=lambda done, total: on_stage("loading", done, total),
        preparing=lambda done, total: on_stage("preparing passes", done, total),
    )
    try:
        for name, path in start.adapters.items():
            engine.adapters.load(name, path)
    except BaseException:
        engine.close()
        raise
    return engine
