"""Native decoders for tests, and what must be there to run them."""

from dataclasses import replace
from pathlib import Path

import pytest

from foreword.backends.cpu.decoder import CpuDecoder, load_cpu_decoder
from foreword.backends.cpu.packing import FORMATS
from foreword.kernels.native import TILED_ISA, native_status
from foreword.models.formats.checkpoint import open_checkpoint

STATUS = native_status()
needs_cpu_kernels = pytest.mark.skipif(not STATUS.available, reason=f"no CPU kernels: {STATUS.reason}")
INSTRUCTION_SETS = STATUS.instruction_sets
needs_amx = pytest.mark.skipif(TILED_ISA not in INSTRUCTION_SETS, reason="no AMX here")


def cpu_decoder(path: Path, form: str, threads: int = 2, kv_dtype: str | None = None) -> CpuDecoder:
    numbers = FORMATS[form]
    if kv_dtype is not None:
        numbers = replace(numbers, kv_dtype=kv_dtype)
    return load_cpu_decoder(open_checkpoint(path), numbers, threads=threads)
