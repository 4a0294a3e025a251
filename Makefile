# `make demo` and `make test` set everything up by themselves.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow mutants lint format clean

demo: $(READY)
	$(BIN)/foreword demo

test: lint
	$(BIN)/foreword pull smollm2-135m
	$(BIN)/pytest -m "not slow" --durations=10

test-slow: $(READY)
	$(BIN)/foreword pull smollm2-135m
	$(BIN)/pytest -m slow --durations=10

mutants: $(READY)
	$(BIN)/python tests/mutants/run.py --json

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The environment is made anew when what it is made of changes.
$(READY): pyproject.toml constraints.txt CMakeLists.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "foreword needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable ".[dev]"
	touch $(READY)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
