"""Counts of compiled kernels and kept states, as fields of `EngineStats`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from foreword.kv.chunks import ChunkPool

if TYPE_CHECKING:  # Triton is installed only on GPU machines
    from foreword.backends.cuda.compiling import Kernels


def compiled_counts(kernels: "Kernels | None") -> dict[str, Any]:
    """Return the kernels and passes of a GPU; nothing without one."""
    if kernels is None:
        return {}
    counts = {f"passes_{name}": count for name, count in asdict(kernels.passes).items()}
    return counts | {"kernels_loaded": kernels.loaded, "kernels_pending": kernels.pending}


def state_counts(chunks: ChunkPool | None) -> dict[str, Any]:
    """Return the states of recurrent layers; nothing for a model without them."""
    if chunks is None:
        return {}
    counts = chunks.counts
    return {
        "states": chunks.sizes.states,
        "states_used": chunks.states_used,
        "state_checkpoints": chunks.num_checkpoints,
        "state_hits": counts.hits,
        "state_evictions": counts.evicted,
    }
