#!/usr/bin/env bash
# Builds the kernels and runs the tests on a machine without a network, with its own Python and torch: on a GPU the
# CUDA tests run too. What else the tests need lies as wheels in carry/, put there by `scripts/gpu_check.sh carry`
# (for CPython 3.12 on x86_64 unless CARRY_PYTHON and CARRY_PLATFORM say otherwise). Further arguments go to pytest;
# `scripts/gpu_check.sh mutants [options]` runs the mutants instead (with --outcomes FILE a later call tries the rest),
# `scripts/gpu_check.sh bench [options]` foreword bench gpu,
# `scripts/gpu_check.sh sanitize [memcheck|racecheck|initcheck|synccheck] [tests]` the tests of the GPU's kernels under
# compute-sanitizer, in SANITIZE_JOBS processes that have SANITIZE_SECONDS.
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
        httpx2 hypothesis idna importlib-metadata iniconfig jinja2 jiter jsonschema-rs llguidance markdown-it-py markupsafe mdurl msgspec nanobind openai opentelemetry-api packaging \
        platformdirs pluggy prometheus_client psutil pydantic pydantic-core pygments pytest pytest-timeout pytest-xdist \
        pyyaml requests rich shellingham sniffio sortedcontainers starlette tqdm typer typing-extensions \
        truststore typing-inspection uvicorn zipp
    # NumPy from 2.4 on raises where the interpreter of Triton 3.6 turns an array into a number.
    "$PYTHON" -m pip download --quiet --dest carry --no-deps --only-binary=:all: \
        --python-version "${CARRY_PYTHON:-3.12}" --platform "manylinux_2_28_${CARRY_PLATFORM:-x86_64}" \
        --platform "manylinux2014_${CARRY_PLATFORM:-x86_64}" 'numpy<2.4'
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

build() {
    echo "== build"
    BUILD=build/check-$(uname -m)
    GENERATOR=$(command -v ninja > /dev/null && echo Ninja || echo "Unix Makefiles")
    cmake -S . -B "$BUILD" -G "$GENERATOR" -DPython_EXECUTABLE="$(command -v "$PYTHON")" \
        -Dnanobind_DIR="$("$PYTHON" -m nanobind --cmake_dir)" > /dev/null
    cmake --build "$BUILD" -j "$(nproc)" | tail -1
    rm -f src/foreword/kernels/_native*.so
    cp "$BUILD"/_native*.so src/foreword/kernels/
    "$PYTHON" -c 'from foreword.kernels import _native; print("instruction sets:", _native.instruction_sets())'
}

sanitize() {
    local tool=${1:-memcheck} sanitizer logs jobs seconds total
    shift || true
    local tests=("$@")
    if [ ${#tests[@]} = 0 ]; then
        tests=(tests/unit/backends/cuda tests/unit/kernels/test_triton_draw.py)
        # Whole models as well where that takes seconds: the other tools look at every access several times.
        [ "$tool" != memcheck ] || tests+=(tests/integration/test_cuda_{adapters,decoder,graphs,head_chains}.py)
    fi
    sanitizer=$(command -v compute-sanitizer || find "${CUDA_HOME:-/usr/local}" /usr/local /opt -name compute-sanitizer -type f -perm -u+x 2> /dev/null | head -1)
    if [ -z "$sanitizer" ]; then
        echo "compute-sanitizer is not installed; it comes with the CUDA toolkit" >&2
        exit 2
    fi
    jobs=${SANITIZE_JOBS:-$(nproc)} seconds=${SANITIZE_SECONDS:-140} logs=$(mktemp -d)
    local options=(--tool "$tool" --target-processes application-only --error-exitcode 99)
    # torch asks the driver for what it may not have, and goes on: only accesses count.
    [ "$tool" != memcheck ] || options+=(--report-api-errors no)
    # Without caching every tensor has bounds of its own; nothing can be captured then (tests/helpers/cuda.py).
    export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 FOREWORD_THREADS=1
    local pytest=("$PYTHON" -m pytest -p no:cacheprovider -W ignore -o addopts=--import-mode=importlib)
    "${pytest[@]}" --collect-only -q -m "not slow and not model" "${tests[@]}" > "$logs/collected" 2>&1 \
        || { tail -5 "$logs/collected" >&2; exit 1; }
    grep :: "$logs/collected" > "$logs/all"
    total=$(wc -l < "$logs/all")
    split -n "r/$jobs" --additional-suffix .tests "$logs/all" "$logs/"
    for part in "$logs"/*.tests; do
        timeout -k 5 "$seconds" "$sanitizer" "${options[@]}" \
            "${pytest[@]}" -v --no-header "@$part" > "${part%.tests}.log" 2>&1 &
    done
    wait || true
    count() { cat "$logs"/*.log | { grep -cE "$1" || true; }; }
    local passed failed skipped reports
    passed=$(count '::.* PASSED') failed=$(count '::.* (FAILED|ERROR)') skipped=$(count '::.* SKIPPED')
    reports=$(count '^========= (Invalid|Uninitialized|Error: |ERROR: |Race|Barrier|Misaligned)')
    grep -hE '^========= (Invalid|Uninitialized|Error: |ERROR: |Race|Barrier|Misaligned)|^(FAILED|ERROR) ' "$logs"/*.log \
        | sort | uniq -c | sort -rn | head -20 || true
    # Where not one test has ended, the end of the log says why.
    grep -LE '::.* (PASSED|FAILED|ERROR|SKIPPED)' "$logs"/*.log | head -1 | xargs -r tail -n 4 || true
    echo "$tool: $total tests, $passed passed, $failed failed, $skipped skipped," \
        "$((total - passed - failed - skipped)) not finished in $seconds s; $reports reports (logs in $logs)"
    [ "$failed" = 0 ] && [ "$reports" = 0 ] && [ "$((passed + skipped))" = "$total" ]
}

if [ "${1:-}" = sanitize ]; then
    "$PYTHON" -c 'from foreword.kernels import _native' 2> /dev/null || build
    sanitize "${@:2}"
    exit
fi

build

if [ "${1:-}" = mutants ]; then
    OMP_NUM_THREADS=1 FOREWORD_THREADS=1 exec "$PYTHON" tests/mutants/run.py --json --jobs "$(nproc)" "${@:2}"
fi

if [ "${1:-}" = bench ]; then
    exec "$PYTHON" -m foreword bench gpu "${@:2}"
fi

echo "== tests"
# Every test that does not pass is named at once: the end may never come where a machine is lent for minutes.
OMP_NUM_THREADS=1 FOREWORD_THREADS=1 "$PYTHON" -m pytest -p no:cacheprovider -W ignore -m "not slow and not model" \
    -o addopts=--import-mode=importlib -v -n "$(nproc)" --dist loadfile --durations=5 "$@" \
    | { grep --line-buffered -vE '^\[gw[0-9]+\].* (PASSED|SKIPPED|XFAIL) |^tests/[^ ]+::.* $|^$' || true; }
