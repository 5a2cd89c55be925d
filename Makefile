# Two commands matter: `make demo` and `make test`. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SHELL  := /bin/bash

.PHONY: demo test test-slow test-extras lint bench setup clean

demo: $(STAMP)
	@$(BIN)/cotenant demo --out demo-out

test: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -m "not slow" -n auto --maxprocesses 4 --dist loadfile

test-slow: $(STAMP)
	$(BIN)/pytest -q -m "slow and not extras"

test-extras: $(STAMP)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[torch,ray]'
	$(BIN)/pytest -q -m extras tests

lint: $(STAMP)
	$(BIN)/ruff check src tests bench
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	$(BIN)/python -m pytest -q -s --ignore=bench/gpu bench

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "cotenant needs Python 3.11 or newer; this is " + sys.version.split()[0] + " (choose another with make PYTHON=...)")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing cotenant into $(VENV) (once; about two minutes)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo "compiling the simulator (once; about 20 s)"
	@$(BIN)/python -c 'from cotenant.sim.jobs.sweep import compile_once; compile_once()'
	@touch $(STAMP)

clean:
	rm -rf $(VENV) build demo-out .pytest_cache .mypy_cache .ruff_cache
