# Two commands matter: `make demo` shows the main job on a real model, `make test` proves it.
# Both set up what they need in .venv; the demo makes its model in models/.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=
# The first interpreter that is 3.11 or newer and really starts.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

.PHONY: demo test check bench setup clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	@test -n "$(PYTHON)" || { echo "kvstore needs Python 3.11 or newer; set PYTHON=/path/to/python" >&2; exit 1; }
	@echo "setting up $(VENV); this takes a minute"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

demo: setup
	$(BIN)/python examples/demo.py $(if $(MODEL),--model '$(MODEL)')

test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
