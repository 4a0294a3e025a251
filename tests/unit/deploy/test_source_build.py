"""The build from source says what is missing, and the kernels that it gives see the CPU as the system does."""

import os
import platform
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from foreword.kernels import _native
from helpers.cpu import INSTRUCTION_SETS, needs_cpu_kernels

ROOT = Path(__file__).parents[3]
AVX2 = {"avx2", "fma", "f16c"}
AVX512 = AVX2 | {"avx512f", "avx512dq", "avx512bw", "avx512vl", "avx512_vnni"}
FLAGS = {"avx512-amx": AVX512 | {"amx_tile", "amx_int8"}, "avx512-vnni": AVX512, "avx2": AVX2}


@pytest.mark.parametrize(
    ("name", "is_taken"),
    [
        ("foreword-0.1.0-cp312-abi3-manylinux_2_27_aarch64.whl", True),
        ("foreword-0.1.0-cp311-cp311-manylinux_2_28_x86_64.whl", True),
        ("foreword-0.1.0-cp311-cp311-manylinux_2_34_x86_64.whl", False),
        ("foreword-0.1.0-cp311-cp311-linux_x86_64.whl", False),
    ],
)
def test_a_wheel_that_needs_a_newer_c_library_is_refused(name: str, is_taken: bool):
    check_tag = runpy.run_path(str(ROOT / "scripts" / "build_wheels.py"))["check_tag"]
    with nullcontext() if is_taken else pytest.raises(SystemExit, match=r"does not run with glibc 2\.28"):
        check_tag(name)


@pytest.mark.parametrize("arguments", [[], ["no-such.whl"]])
def test_the_check_for_aarch64_asks_for_a_wheel_before_it_fetches_anything(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["aarch64_check.py", *arguments])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("a command was run"))
    main = runpy.run_path(str(ROOT / "scripts" / "aarch64_check.py"))["main"]
    with pytest.raises(SystemExit, match=r"^aarch64_check: usage: .*WHEEL"):
        main()


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


@needs_cpu_kernels
def test_the_check_for_other_machines_passes_here():
    runpy.run_path(str(ROOT / "scripts" / "native_check.py"))["check_exactness"](INSTRUCTION_SETS[0])
