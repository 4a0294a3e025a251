#!/usr/bin/env bash
# Builds the CPU kernels with plain CMake and checks them on this machine: kernel tests on every instruction set,
# a whole decoder against torch, bit-exactness, and the cost of a step. Needs Python with torch, cmake and a C++
# compiler, and no network: nanobind, pytest and gguf may lie in carry/, put there by `scripts/x86_check.sh carry`.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

if [ "${1:-}" = carry ]; then
    # Pure Python packages of the present environment, small enough to travel with the working tree.
    rm -rf carry && mkdir -p carry
    "$PYTHON" - <<'PY'
import importlib.util, pathlib, shutil
for name in ("nanobind", "gguf", "pytest", "_pytest", "pluggy", "iniconfig", "packaging", "tqdm", "pygments"):
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"{name} is not installed here")
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "scripts")
    shutil.copytree(found.submodule_search_locations[0], pathlib.Path("carry") / name, ignore=ignore)
PY
    du -sh carry
    exit
fi

export PYTHONPATH="$PWD/src:$PWD/tests:$PWD/carry${PYTHONPATH:+:$PYTHONPATH}"
echo "== machine"
uname -m
grep -m1 'model name' /proc/cpuinfo || true
nproc
"$PYTHON" -c 'import sys, torch; print(sys.version.split()[0], "torch", torch.__version__)'

echo "== build"
BUILD=build/check-$(uname -m)
GENERATOR=$(command -v ninja > /dev/null && echo Ninja || echo "Unix Makefiles")
cmake -S . -B "$BUILD" -G "$GENERATOR" -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
    -Dnanobind_DIR="$("$PYTHON" -m nanobind --cmake_dir)"
cmake --build "$BUILD" -j "$(nproc)"
rm -f src/foreword/kernels/_native*.so
cp "$BUILD"/_native*.so src/foreword/kernels/
"$PYTHON" -c 'from foreword.kernels import _native; print("instruction sets:", _native.instruction_sets())'

echo "== kernel tests"
"$PYTHON" -m pytest --noconftest -p no:cacheprovider -q -W ignore tests/unit/kernels/test_kernels.py

echo "== decoder and step cost"
"$PYTHON" scripts/native_check.py
