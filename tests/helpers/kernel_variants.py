"""Counts the kernels that Triton would compile, without a GPU: launches are recorded with Triton's own keys, none runs.

Run as a program, since kernels that other tests interpret cannot be recorded in the same process.
"""

import json
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

SHARED_BYTES = 232_448  # of an H200


class RecordedDevice:
    """A driver without a device: kernels get as far as their key."""

    utils = SimpleNamespace(get_device_properties=lambda _: {"max_shared_mem": SHARED_BYTES})

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


class RecordedKernel:
    """What is launched from the second time on."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        return None

    def run(self, *_: object) -> None:
        return None


class Variants:
    """Kernels by name and key."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, str]] = set()
        driver.set_active(RecordedDevice())
        knobs.runtime.jit_cache_hook = self._keep

    def _keep(self, *, key: str, fn: Any, **_: object) -> bool:
        self.keys.add((fn.name, key))
        fn.jit_function.device_caches[0][0][key] = RecordedKernel()
        return True  # not compiled, and so not launched

    def by_kernel(self) -> Counter[str]:
        return Counter(name for name, _ in self.keys)


def fill_new_memory() -> None:
    """What no kernel writes is zero, so that tokens and lengths that are read from it are valid."""
    made: Any = torch
    made.empty, made.empty_like = torch.zeros, torch.zeros_like
    made.Tensor.new_empty = torch.Tensor.new_zeros


def count(folder: Path) -> Counter[str]:
    """One request after another with texts of several lengths, plainly and with a head's chains of every depth."""
    variants = Variants()
    fill_new_memory()
    from foreword.backends.cuda import chain_heads, decoder
    from foreword.backends.cuda.kernels import dependent_launch
    from foreword.backends.cuda.products import Products
    from foreword.backends.torch.weights import load_weights
    from foreword.control.fixed import FixedPolicy
    from foreword.engine.assembly import make_core
    from foreword.engine.config import EngineConfig
    from foreword.engine.loader import load_model
    from foreword.engine.profiles import placeholder_request
    from foreword.kernels.triton_draw import draw_rows
    from foreword.speculation.requests import PassEntry
    from foreword.speculation.step import Stepper

    launch, target, heads = cast(Any, dependent_launch), cast(Any, decoder), cast(Any, chain_heads)
    launch._supports_pdl = lambda _: True
    as_logits, fill_in = target.as_logits, heads.fill_in

    def widen_and_draw(numbers: torch.Tensor, *how: float | None) -> torch.Tensor:
        """Launch the draws, too, which acceptance leaves to the host where the logits are there."""
        logits, rows = as_logits(numbers, *how), len(numbers)
        temperature, keys = (
            logits.new_zeros(rows, dtype=torch.float64),
            logits.new_zeros(rows, dtype=torch.int64),
        )
        for samples in (False, True):
            draw_rows(logits, temperature, keys, None, samples=samples)
        return logits

    target.as_logits = widen_and_draw

    def fill_in_some(token_ids: torch.Tensor, drawn: torch.Tensor) -> None:
        """Put a valid token in the place of those that the kernel would read."""
        fill_in(token_ids, drawn)
        token_ids.clamp_(min=0)

    heads.fill_in = fill_in_some
    loaded = load_model(str(folder / "target"), dtype="float32", device="cpu", backend="torch")
    weights = load_weights(loaded.checkpoint, torch.bfloat16, torch.device("cpu"))
    made = target.CudaDecoder(loaded.checkpoint.config, weights, Products(least_part=16))
    speculation = {
        "method": "eagle3",
        "model": str(folder / "eagle3"),
        "num_speculative_tokens": 8,
        "fixed": True,
    }
    core = make_core(replace(loaded, decoder=made), EngineConfig(kv_cache_memory_bytes=1 << 24), speculation)
    plan = core.drafters.default
    assert plan is not None

    def decode(prompt: int, temperature: float, depths: list[int], steps: int) -> None:
        request = placeholder_request(core, [1] * prompt, temperature=temperature)
        for number in range(steps):
            depth = depths[number % len(depths)]
            request.speculation = replace(plan, max_nodes=depth, max_depth=depth) if depth else None
            policy = FixedPolicy(plan.drafter, depth, depth) if depth else FixedPolicy()
            stepper = Stepper(core.runner, core.cache, policy, core.max_rows, store=core.runner.store)
            stepper.step([PassEntry.of(request, len(request.tokens) - request.kv.computed)])
        core.cache.close(request.kv)

    for prompt in (5, 100, 300, 1200):
        for temperature in (0.0, 1.0):
            decode(prompt, temperature, [0], 4)
            decode(prompt, temperature, [8, 1, 2, 3, 5, 4, 0, 7, 6], 18)
    assert not core.faults and not core.drafters.fault_counts(), (core.faults, core.drafters.fault_counts())
    return variants.by_kernel()


if __name__ == "__main__":
    json.dump(count(Path(sys.argv[1])), sys.stdout)
