"""Programmatic dependent launch: a kernel becomes resident while the previous one still runs (Hopper and later).

A GPU idles for about a microsecond between dependent kernels, and a pass over few rows is some 300 short kernels. A
kernel launched this way becomes resident once every program of the previous kernel has allowed it. Before it reads or
writes anything, it waits until the previous kernel has ended. Since every kernel does so, all earlier ones have ended
too.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

AHEAD_ROWS = 64
"""Maximum rows: with more, waiting programs take registers and shared memory from working ones."""


@triton.jit
def wait_for_the_kernel_before(AHEAD: tl.constexpr) -> None:
    """Wait until the previous kernel has ended. Call it first; not even a program without work may return before it."""
    if AHEAD:
        gdc_wait()


@triton.jit
def let_the_next_kernel_come(AHEAD: tl.constexpr) -> None:
    """Allow the next kernel to become resident, once every program has called this; most kernels do so at the start."""
    if AHEAD:
        gdc_launch_dependents()


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


def ahead(rows: Tensor) -> dict[str, bool]:
    """Options of the launch of a kernel over these rows."""
    if len(rows) <= AHEAD_ROWS and _can_be_ahead(rows.device):
        return {"AHEAD": True, "launch_pdl": True}
    return {"AHEAD": False}


@cache
def _can_be_ahead(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
