"""Checks and times the CPU kernels on a random model of SmolLM2's shape; needs nothing but torch."""

import os
from dataclasses import replace
from statistics import median
from time import perf_counter

import torch

from foreword.backends.cpu.decoder import load_cpu_decoder
from foreword.backends.cpu.packing import FORMATS
from foreword.backends.interface import Decoder
from foreword.backends.torch.decoder import TorchDecoder
from foreword.backends.torch.weights import load_weights
from foreword.bench.step_cost import DecoderTimer, compare_step_cost
from foreword.kernels.native import ISA_VARIABLE, native_status
from helpers.passes import all_logits
from helpers.random_checkpoint import SMOLLM2_SHAPE, RandomCheckpoint

SIZES = (1, 2, 4, 8, 16)
THREADS = min(8, len(os.sched_getaffinity(0)))


def check_exactness(isa: str) -> None:
    """Check that float32 equals torch, and that a row's bits do not depend on other rows of the pass or on threads."""
    checkpoint = RandomCheckpoint(replace(SMOLLM2_SHAPE, layers=SMOLLM2_SHAPE.layers[:4], vocab_size=1000))
    ids = torch.randint(0, 1000, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))
    expected = all_logits(TorchDecoder(checkpoint.config, weights), ids)
    for form in ("float32", "int8", "q8_0"):
        logits = all_logits(load_cpu_decoder(checkpoint, FORMATS[form], threads=1), ids)
        many = load_cpu_decoder(checkpoint, FORMATS[form], threads=THREADS)
        same = torch.equal(all_logits(many, ids), logits)
        same = same and torch.equal(all_logits(many, ids[:37]), logits[:37])
        error = float((logits - expected).norm() / expected.norm())
        print(f"{isa:12} {form:8} relative error {error:.2e}  invariant {same}")
        assert same
        assert error < (1e-5 if form == "float32" else 0.1)


def show_cost(name: str, decoder: Decoder) -> None:
    """Print one line with the times of a step of every size and of a prompt."""
    costs = compare_step_cost({name: DecoderTimer(decoder, 256, max(SIZES))}, SIZES)[name].steps
    cells = "  ".join(f"n={cost.n}: {cost.ms:6.2f} ms ({cost.ratio:.2f})" for cost in costs)
    times = []
    for _ in range(3):
        began = perf_counter()
        all_logits(decoder, list(range(100, 228)))
        times.append(perf_counter() - began)
    print(f"{name:24} {cells}  128 rows with logits: {1e3 * median(times):.0f} ms", flush=True)


def main() -> None:
    """Check and time every instruction set, then time torch for comparison."""
    checkpoint = RandomCheckpoint(SMOLLM2_SHAPE)
    for isa in native_status().instruction_sets:
        os.environ[ISA_VARIABLE] = isa
        check_exactness(isa)
        for form in ("int8", "q8_0", "float32"):
            show_cost(f"{isa} {form}", load_cpu_decoder(checkpoint, FORMATS[form], threads=THREADS))
    torch.set_num_threads(THREADS)
    weights = load_weights(checkpoint, torch.float32, torch.device("cpu"))
    show_cost("torch float32", TorchDecoder(checkpoint.config, weights))
    print(f"threads: {THREADS}")


if __name__ == "__main__":
    main()
