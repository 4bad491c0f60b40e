# `make demo` and `make test` set up everything they need on a fresh machine, then run. Running them again is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export MAX_JOBS ?= $(shell nproc)
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: demo test build lint wheel clean

demo: $(VENV)/.built
	$(BIN)/python -m pip install -q $(QUIET) ".[demo]" --no-build-isolation --no-deps >/dev/null 2>&1 || true
	$(BIN)/python examples/serve.py

test: lint $(VENV)/.built
	$(BIN)/python -m pytest

build: $(VENV)/.built
