# Everything runs from .venv, which `make install` creates and keeps up to date.
# Needs only Python 3.11 or newer with venv, make and bash.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PY := $(BIN)/python
STAMP := $(VENV)/.installed
# Extra arguments for pytest, for example: make test TESTS="tests/test_java.py -x"
TESTS ?=
# How many processes share the suite; a test waits for its server more than it computes.
JOBS ?= 3

.PHONY: help install lint format test demo ui bench-queue bench-spark build constraints clean

help: ## Show this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
		printf 'make %-12s %s\n' "$$name" "$$text"; done

install: $(STAMP) ## Create .venv with everything; does nothing when it is up to date

# Newer than both files = nothing changed since the last complete install. An interrupted install leaves no stamp.
$(STAMP): pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "make: '$(PYTHON)' was not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$("$(PYTHON)" --version) is too old; Python 3.11 or newer is needed, name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "make: this Python has no venv module; install it (on Debian and Ubuntu: apt-get install python3-venv)" >&2; exit 1; }
	@test -x $(PY) || { echo "creating $(VENV)"; "$(PYTHON)" -m venv $(VENV); }
	@echo "installing (the first time takes some minutes: Spark alone is 450 MB)"
# --no-compile: most of what is installed is never imported; the rest is compiled at first import.
	$(PY) -m pip install --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

lint: $(STAMP) ## Check format, rules, types, layers and SQL
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/sqlfluff lint --processes 2 --disable-progress-bar sql

format: $(STAMP) ## Rewrite the Python files in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: $(STAMP) ## Run the whole suite against real PostgreSQL, Spark and Airflow
	$(BIN)/pytest --numprocesses $(JOBS) --dist loadgroup $(TESTS)

demo: $(STAMP) ## Push, sense, pop and acknowledge in one run, print what happened, leave nothing behind
	$(PY) -m airflow_provider_queen.demo

ui: $(STAMP) ## The same, with Airflow's UI left running until Ctrl-C
	$(PY) -m airflow_provider_queen.demo --ui

bench-queue: $(STAMP) ## Measure push, pop and acknowledge, each beside a limit of the same run (10 minutes)
	$(PY) benchmarks/bench_queue.py

bench-spark: $(STAMP) ## Measure Spark's reading, writing, retention and metrics beside plain SQL (15 minutes)
	$(PY) benchmarks/bench_spark.py

build: $(STAMP) ## Build the wheel and the source archive into dist/
	rm -rf dist
	$(PY) -m build --no-isolation

constraints: ## Write the installed versions to constraints.txt
	{ sed -n '/^#/p' constraints.txt; $(PY) -m pip freeze --exclude-editable; } > constraints.new
	mv constraints.new constraints.txt

clean: ## Remove .venv and everything that was built or cached
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis spark-warehouse metastore_db
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
