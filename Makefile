# Two commands matter: `make demo` shows the main job on a real model, `make test` proves it.
# Both set up what they need in .venv; the demo makes its model in models/.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
MODEL ?=
# The first interpreter that is 3.11 or newer and really starts.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)

# The older release of mlx-lm that kvstore also works with, in an environment of its own, and what is tested there:
# whatever knows of caches, models and prompt-cache files.
OLDER := 0.31.3
OLDER_VENV := .venvs/mlx-lm-$(OLDER)
OLDER_TESTS := tests/older_mlx_lm tests/cli/test_generate.py tests/cli/test_verbs.py tests/cli/test_wp30.py \
	$(patsubst %,tests/runtime/test_%.py,batch binding capture kinds kinds_refused lazy pairs prefill probe \
	prompt_file prompt_shapes sparse store)

.PHONY: demo test test-older check bench setup clean

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

# Without arguments for pytest, with the older release, too.
test: setup
	$(BIN)/python -m pytest $(PYTEST_ARGS)
	$(if $(PYTEST_ARGS),,$(MAKE) test-older)

test-older: setup $(OLDER_VENV)/.ready
	$(OLDER_VENV)/bin/python -m pytest -p no:cacheprovider $(OLDER_TESTS)

$(OLDER_VENV)/.ready: pyproject.toml | $(VENV)/.ready
	@echo "setting up $(OLDER_VENV); this takes a minute"
	@test -x $(OLDER_VENV)/bin/python || $(BIN)/python -m venv $(OLDER_VENV)
	$(OLDER_VENV)/bin/python -m pip install --quiet --editable '.[test]' 'mlx-lm==$(OLDER)'
	@touch $@

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venvs build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
