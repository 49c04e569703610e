# Two commands: `make demo` and `make test`. Each does all its own set-up in .venv; `make help` lists the rest.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory --no-builtin-rules

PYTHON ?= python3
EXTRAS := dev,docs,plot,s3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TESTS ?= tests
ARGS ?=
BENCHMARKS = $(patsubst benchmarks/%.py,%,$(filter-out benchmarks/_%,$(wildcard benchmarks/*.py)))

# Without bytecode `import torch` takes 6 s instead of 2 s, in every rank and worker.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test check format lab integration bench docs clean

help: ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) ## .venv with everything the other targets need (they call this themselves)

# uv resolves in seconds where pip takes minutes, but reads no pip.conf: where it cannot install, pip does.
# A half-made environment has no stamp, so the next run starts over.
$(READY): pyproject.toml constraints/ci.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
	    echo "swapckpt needs Python >= 3.10; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.11" >&2
	    exit 1
	}
	if [ ! -x $(BIN)/python ]; then
	    echo "set-up: creating $(VENV)"
	    $(PYTHON) -m venv $(VENV) || {
	        rm -rf $(VENV)
	        echo "$(PYTHON) cannot make a virtual environment (Debian and Ubuntu: apt install python3-venv)" >&2
	        exit 1
	    }
	fi
	export VIRTUAL_ENV=$(abspath $(VENV)) UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-}}"
	echo "set-up: installing swapckpt[$(EXTRAS)] into $(VENV)"
	if $(BIN)/python -m pip install --quiet --disable-pip-version-check uv \
	    && $(BIN)/uv pip install --quiet -c constraints/ci.txt -e '.[$(EXTRAS)]'; then
	    :
	else
	    echo "set-up: uv could not install; pip takes over (minutes)" >&2
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints/ci.txt -e '.[$(EXTRAS)]'
	fi
	touch $@

demo: $(READY) ## train, be killed while saving, resume bit for bit (ARGS=--quick for 30 s)
	@$(BIN)/swapckpt demo $(ARGS)

test: $(READY) ## the test suite on two workers (TESTS=path ARGS=-x)
	@$(BIN)/python -m pytest -n 2 --dist loadgroup $(TESTS) $(ARGS)

check: $(READY) ## lint, format, types, import floors, spelling
	@failed=
	for command in "ruff check" "ruff format --check" mypy lint-imports codespell; do
	    echo "== $$command"
	    $(BIN)/$$command || failed+=" [$$command]"
	done
	[ -z "$$failed" ] || { echo "make check failed:$$failed" >&2; exit 1; }

format: $(READY) ## rewrite the sources as `make check` wants them
	@$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lab: $(READY) ## every mutant with its verdict, and long random runs (minutes)
	@$(BIN)/python -m tests.lab
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest tests/lab/test_state_machine.py tests/snapshot -q $(ARGS)
	SWAPCKPT_FUZZ=1700 $(BIN)/python -m pytest tests/storage/test_fuzz.py -q -o timeout=1800 $(ARGS)

integration: $(READY) ## real processes: torchrun on gloo, the built wheel, torch_npu
	@$(BIN)/python -m pytest -n 2 --dist loadgroup integration $(ARGS)

npu: $(READY) ## the published torch_npu on a simulated Ascend runtime
	@$(BIN)/python -m pytest integration/npu $(ARGS)

device-check: $(READY) ## parity, memory and speed on the accelerator of this machine (4 minutes)
	@mkdir -p benchmarks/results
	$(BIN)/python integration/device_check.py --json benchmarks/results/device_check.json $(ARGS)

bench: $(READY) ## every benchmark at quick size; tables here, JSON into benchmarks/results
	@[ -n "$(BENCHMARKS)" ] || { echo "no benchmarks under benchmarks/" >&2; exit 1; }
	mkdir -p benchmarks/results
	for name in $(BENCHMARKS); do
	    echo "== $$name"
	    $(BIN)/python -m benchmarks.$$name --quick --json benchmarks/results/$$name.json $(ARGS)
	done

docs: $(READY) ## HTML into docs/_build, warnings are errors
	@$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build
	echo "docs/_build/index.html"

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) .cache .hypothesis .ruff_cache .import_linter_cache build dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
