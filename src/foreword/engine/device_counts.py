"""Statistics of an engine's kernels and of its recurrent states."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foreword.kv.chunks import ChunkPool

if TYPE_CHECKING:  # Triton is installed only on GPU machines
    from foreword.backends.cuda.compiling import Kernels


def device_counts(kernels: "Kernels | None", chunks: ChunkPool | None) -> dict[str, Any]:
    """Return the fields of `EngineStats` that count kernels, if any, and states of recurrent layers, if any."""
    counts: dict[str, Any] = {}
    if kernels is not None:
        counts = {f"passes_{name}": count for name, count in asdict(kernels.passes).items()}
        counts |= {"kernels_loaded": kernels.loaded, "kernels_pending": kernels.pending}
    if chunks is not None:
        counts |= {"states": chunks.sizes.states, "states_used": chunks.states_used}
        counts |= {"state_checkpoints": chunks.num_checkpoints}
        counts |= {"state_hits": chunks.counts.hits, "state_evictions": chunks.counts.evicted}
    return counts
