"""The build from source says what is missing, and the kernels that it gives see the CPU as the system does."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.kernels import _native

ROOT = Path(__file__).parents[3]
AVX2 = {"avx2", "fma", "f16c"}
FLAGS = {"avx512-vnni": AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}, "avx2": AVX2}


def test_without_a_compiler_one_line_says_what_to_install(tmp_path: Path):
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    cmake = shutil.which("cmake", path=programs)
    assert cmake is not None
    # Neither PATH nor CXX names a compiler. Any program that starts will do as ninja: nothing is built.
    ninja = f"-DCMAKE_MAKE_PROGRAM={shutil.which('true')}"
    command = [cmake, "-S", str(ROOT), "-B", str(tmp_path), "-G", "Ninja", ninja]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if "no C++ compiler" in line]
    assert "install g++ or clang, or a foreword wheel" in line
    assert line.endswith("-C cmake.define.FOREWORD_KERNELS=OFF .")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or sys.platform != "linux", reason="reads x86 flags of Linux"
)
def test_instruction_sets_are_those_that_the_system_reports():
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    expected = [name for name, flags in FLAGS.items() if flags <= set(line.split())]
    assert _native.instruction_sets() == [*expected, "portable"]
