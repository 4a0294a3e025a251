"""Programmatic dependent launch: a kernel becomes resident while the previous one still runs (Hopper and later).

A GPU idles for about a microsecond between dependent kernels, and a pass over few rows is some 300 short kernels. With
PDL, a kernel becomes resident once every program of the previous kernel has allowed it. Before it reads or writes
anything, it waits until the previous kernel has ended. Since every kernel waits, all earlier kernels have then ended,
too.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

PDL_ROWS = 64
"""Maximum rows of a pass with PDL: with more, waiting programs take registers and shared memory from working ones."""


@triton.jit
def wait_for_previous_kernel(PDL: tl.constexpr) -> None:
    """Wait until the previous kernel has ended. Programs without work must call this too, before they return."""
    if PDL:
        gdc_wait()


@triton.jit
def launch_dependents(PDL: tl.constexpr) -> None:
    """Allow the next kernel to become resident once every program has called this."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def begin_kernel(PDL: tl.constexpr) -> None:
    """Allow the next kernel to become resident, then wait until the previous one has ended."""
    launch_dependents(PDL)
    wait_for_previous_kernel(PDL)


@triton.jit
def fetch_to_cache(at) -> None:
    """Prefetch the cache lines at these addresses, which no kernel writes, to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [at.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def pdl_options(rows: Tensor) -> dict[str, bool]:
    """Return the launch options of a kernel over these rows: with PDL if there are few, and the GPU supports it."""
    if len(rows) <= PDL_ROWS and _supports_pdl(rows.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _supports_pdl(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
