"""Native decoders for tests, and what must be there to run them."""

from pathlib import Path

import pytest

from foreword.backends.cpu.decoder import CpuDecoder, load_cpu_decoder
from foreword.backends.cpu.packing import FORMS
from foreword.kernels.native import native_status
from foreword.models.formats.checkpoint import open_checkpoint

STATUS = native_status()
needs_cpu_kernels = pytest.mark.skipif(not STATUS.available, reason=f"no CPU kernels: {STATUS.reason}")
INSTRUCTION_SETS = STATUS.instruction_sets


def cpu_decoder(path: Path, form: str, threads: int = 2) -> CpuDecoder:
    return load_cpu_decoder(open_checkpoint(path), FORMS[form], threads=threads)
