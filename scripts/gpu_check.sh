#!/usr/bin/env bash
# Builds the kernels and runs the tests on a machine without a network, with its own Python and torch: on a GPU the
# CUDA tests run too. What else the tests need lies as wheels in carry/, put there by `scripts/gpu_check.sh carry`
# (for CPython 3.12 on x86_64 unless CARRY_PYTHON and CARRY_PLATFORM say otherwise). Further arguments go to pytest;
# `scripts/gpu_check.sh mutants` runs the mutants instead, `scripts/gpu_check.sh bench [options]` foreword bench gpu.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}

if [ "${1:-}" = carry ]; then
    rm -rf carry && mkdir -p carry
    "$PYTHON" -m pip download --quiet --dest carry --no-deps --only-binary=:all: \
        --python-version "${CARRY_PYTHON:-3.12}" \
        --platform "manylinux2014_${CARRY_PLATFORM:-x86_64}" --platform "manylinux_2_28_${CARRY_PLATFORM:-x86_64}" --platform any \
        --constraint <(grep -v '^torch' constraints.txt) \
        annotated-doc annotated-types anyio attrs certifi click distro execnet fastapi gguf h11 httpcore httpcore2 httpx \
        httpx2 hypothesis idna importlib-metadata iniconfig jinja2 jiter llguidance markdown-it-py markupsafe mdurl msgspec nanobind openai opentelemetry-api packaging \
        platformdirs pluggy prometheus_client psutil pydantic pydantic-core pygments pytest pytest-timeout pytest-xdist \
        pyyaml requests rich shellingham sniffio sortedcontainers starlette tqdm typer typing-extensions \
        truststore typing-inspection uvicorn zipp
    du -sh carry
    exit
fi

PACKAGES=$(mktemp -d)
"$PYTHON" - "$PACKAGES" carry/*.whl <<'PY'
import sys, zipfile
for wheel in sys.argv[2:]:
    zipfile.ZipFile(wheel).extractall(sys.argv[1])
PY
export PYTHONPATH="$PWD/src:$PWD/tests:$PACKAGES${PYTHONPATH:+:$PYTHONPATH}"
echo "== machine"
uname -m; nproc; grep -m1 'model name' /proc/cpuinfo || true
"$PYTHON" -c 'import sys, torch; print(sys.version.split()[0], "torch", torch.__version__, torch.cuda.is_available() and torch.cuda.get_device_name())'

echo "== build"
BUILD=build/check-$(uname -m)
GENERATOR=$(command -v ninja > /dev/null && echo Ninja || echo "Unix Makefiles")
cmake -S . -B "$BUILD" -G "$GENERATOR" -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
    -Dnanobind_DIR="$("$PYTHON" -m nanobind --cmake_dir)" > /dev/null
cmake --build "$BUILD" -j "$(nproc)" | tail -1
rm -f src/foreword/kernels/_native*.so
cp "$BUILD"/_native*.so src/foreword/kernels/
"$PYTHON" -c 'from foreword.kernels import _native; print("instruction sets:", _native.instruction_sets())'

if [ "${1:-}" = mutants ]; then
    OMP_NUM_THREADS=1 FOREWORD_THREADS=1 exec "$PYTHON" tests/mutants/run.py --json --jobs "$(nproc)"
fi

if [ "${1:-}" = bench ]; then
    exec "$PYTHON" -m foreword bench gpu "${@:2}"
fi

echo "== tests"
OMP_NUM_THREADS=1 FOREWORD_THREADS=1 "$PYTHON" -m pytest -p no:cacheprovider -W ignore -m "not slow and not model" \
    -n "$(nproc)" --dist loadfile --durations=5 "$@"
