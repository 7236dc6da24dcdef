# The front door. `make` alone lists the targets.

PYTHON ?= python3.11
RUNS ?= runs
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test lint format bench

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/installed: requirements.lock pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "error: $(PYTHON) is not installed (or say make PYTHON=...)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

setup: .venv/installed ## install everything into .venv, from the lock file

quickstart: .venv/installed ## train the quickstart study, and write reports/quickstart/
	$(BIN)/python -m experiments.launch quickstart --runs-dir $(RUNS)
	$(BIN)/python -m reports.build quickstart --runs $(RUNS)/quickstart --out reports/quickstart

test: .venv/installed lint ## run the linter and all tests
	$(BIN)/python -m pytest

lint: .venv/installed ## check format and style
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

format: .venv/installed ## format the source
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/installed ## measure speed against the ceilings of this machine
	$(BIN)/python -m experiments.benchmark --json runs/benchmark.json
