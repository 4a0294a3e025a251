# `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
LINT = $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports && \
	$(BIN)/python scripts/vocabulary.py

.PHONY: demo test test-slow mutants browser docs wheels wheel-check lint format clean

demo: $(READY)
	$(BIN)/foreword demo

# Two tests at a time, each on one core; the files in the order of tests/conftest.py. Bytecode is kept whatever the
# environment says: many tests start processes of their own. The linters run beside the tests; what they say comes
# after the tests' report, and either failing fails the target.
# With `=`, since pytest takes an existing file after a space for a test path, and then does not know the option.
test: $(READY)
	$(BIN)/foreword pull smollm2-135m
	mkdir -p build
	( $(LINT) ) > build/lint.log 2>&1 & linting=$$!; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 FOREWORD_THREADS=1 \
		$(BIN)/pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder --durations=10 \
		--core-seconds=build/core-seconds.json; tested=$$?; \
	wait $$linting; linted=$$?; echo "== lint"; cat build/lint.log; test $$tested = 0 -a $$linted = 0

test-slow: $(READY)
	$(BIN)/foreword pull smollm2-135m
	$(BIN)/pytest -m slow --durations=10

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py --json --jobs 2

# The documentation as a site, in build/site.
docs: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# The source archive and the wheels for x86_64 and aarch64, in dist/ (docs/release.md).
wheels:
	$(PYTHON) scripts/build_wheels.py

# The wheel for this machine and PYTHON, used in a fresh environment without a compiler. TORCH_INDEX_URL may name an
# index of torch's CPU builds.
wheel-check:
	$(PYTHON) scripts/check_wheel.py dist $(if $(TORCH_INDEX_URL),--torch-index-url $(TORCH_INDEX_URL))

# The browser that the page's tests drive; without it `make test` skips them.
browser:
	apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver

lint: $(READY)
	$(LINT)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The kernel tests on an extension built with the address and undefined-behaviour sanitisers. Python starts without
# its site hooks, so that this build is found and not the installed one.
SANITIZED := build/sanitize
SANITIZER_TESTS := tests/unit/kernels/test_kernels.py tests/unit/acceptance/test_pipeline.py \
	tests/unit/kernels/test_factors.py tests/integration/test_adapters.py tests/integration/test_cpu_decoder.py \
	tests/integration/test_cpu_mixed.py tests/integration/test_shape_invariance.py \
	tests/integration/test_head_bits.py tests/integration/test_head_chains.py
sanitize: $(READY)
	cmake -S . -B $(SANITIZED) -DFOREWORD_SANITIZE=ON -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python \
		-Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	cmake --build $(SANITIZED)
	rm -rf $(SANITIZED)/package && mkdir -p $(SANITIZED)/package
	cp -r src/foreword $(SANITIZED)/package/ && rm -f $(SANITIZED)/package/foreword/kernels/_native*.so
	cp $(SANITIZED)/_native*.so $(SANITIZED)/package/foreword/kernels/
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 OMP_NUM_THREADS=1 \
		PYTHONPATH=$(SANITIZED)/package:$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') \
		$(BIN)/python -S -m pytest -p no:cacheprovider -m "not model" $(SANITIZER_TESTS)

# The environment is made anew when what it is made of changes.
$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard native/*.* native/isa/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "foreword needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
