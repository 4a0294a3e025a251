"""Creates the engine in its process."""

from foreword.engine.config import EngineConfig
from foreword.engine.engine import Engine
from foreword.progress import StageProgress
from foreword.wire.frames import Start


def load_engine(start: Start, on_stage: StageProgress) -> Engine:
    """Load the model and start the engine's thread; `on_stage` reports progress."""
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
