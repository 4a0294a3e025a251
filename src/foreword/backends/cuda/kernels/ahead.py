"""Kernels that are made ready while the one before them still runs (Hopper and later).

Between two kernels that wait for each other a GPU idles for about a microsecond, and a pass over few rows is some 300
short kernels. One that is launched ahead takes its place as soon as every program of the one before has said that it
may, and waits there, before it reads or writes anything, until that one has ended. It has waited in the same way, so
that whatever was launched earlier has ended, too.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

AHEAD_ROWS = 64
"""Rows up to which it is worth it: programs that wait take room from those that work."""


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
