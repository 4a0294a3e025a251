"""Records, compiles and finds a kernel without a GPU. Run as a program: other tests interpret the same kernels."""

import os
import sys

os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from foreword.backends.cuda.compile_server import TargetOnly
from foreword.kernels.launching import NotCompiledError
from foreword.kernels.recording import is_recording, recording
from helpers.kernel_variants import RecordedDevice


def assert_one_variant_for_any_number_of_requests() -> None:
    """What is prepared for one request serves others: the number of requests is no part of a kind of pass."""
    from foreword.backends.cuda.kernels.chains import count_accepted

    with recording() as missing:
        for room in (1, 2, 50):
            places, small = torch.zeros((room, 4), dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
            count_accepted(small.long(), small[:room], small.long(), places, small[:room].clone())
    assert len(missing) == 1, list(missing)


def main(arch: int) -> None:
    from foreword.backends.cuda.compiling import CompileProcess
    from foreword.backends.cuda.kernels.rows import as_logits, take_rows

    driver.set_active(RecordedDevice())
    numbers, rows = torch.ones(2, 16, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    with recording() as missing:
        assert is_recording()
        as_logits(numbers)
        as_logits(numbers[:1])
        take_rows(numbers, rows)
    assert not is_recording()
    assert [variant.kernel for variant in missing] == ["_as_logits", "_take_rows"]
    assert_one_variant_for_any_number_of_requests()
    first = next(iter(missing))
    driver.set_active(TargetOnly(GPUTarget("cuda", arch, 32)))
    try:
        first.function.find(first.data)
        raise AssertionError("nothing is compiled yet")
    except NotCompiledError:
        pass
    compiler, found = CompileProcess(arch), []
    for variant in missing:
        compiler.compile(variant)
    while len(found) < len(missing):
        if (done := compiler.done(1.0)) is not None:
            assert not done[1], done
            found.append(done[0])
    assert set(found) == set(missing)
    for variant in missing:
        assert variant.function.find(variant.data).asm["cubin"]


if __name__ == "__main__":
    main(int(sys.argv[1]))
