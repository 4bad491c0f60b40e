# `make demo` and `make test` set up all that they need on a fresh machine, then run. Running them again is quick.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export MAX_JOBS ?= $(shell nproc 2>/dev/null || echo 2)
# The GPU architecture that `make test` compiles for; wheels take the default of setup.py.
export ATTNOPS_ARCHS ?= 90a
ENGINES ?= transformers vllm sglang nano_vllm
# Threads that spin while they wait take the cores that others compute on.
export OMP_WAIT_POLICY ?= passive
# Compiled modules are kept, whatever the environment says: tests start many processes.
export PYTHONDONTWRITEBYTECODE :=
# Processes of tests, each about 1 GB. They share cores, so each computes with few threads.
TEST_JOBS ?= $(shell n=$$(nproc 2>/dev/null || echo 2); echo $$((n < 8 ? n : 8)))

.PHONY: demo test docs dashboard engines engine-environments build check soak sanitize sanitizers wheel sdist clean

demo: build
	$(BIN)/python examples/demo.py

test: check
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m "not gpu and not triton" $(PYTEST_ARGS)
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(TEST_JOBS) --dist worksteal -m "triton and not gpu" $(PYTEST_ARGS)

# Each engine pins a torch and a transformers of its own: an environment per engine, .venv-<engine>, from
# requirements/<engine>.txt where there is one. Without it, the engine is left out with the reason.
engines: build
	for engine in $(ENGINES); do \
	  python=$(BIN)/python; test ! -x .venv-$$engine/bin/python || python=.venv-$$engine/bin/python; \
	  status=0; PYTHONPATH=python $$python tools/check_engine.py $$engine || status=$$?; \
	  test $$status != 3 || continue; test $$status = 0 || exit 1; \
	  PYTHONPATH=python $$python -m pytest -rs tests/plugins/test_$$engine*.py $(PYTEST_ARGS) || exit 1; \
	done

# The environments that packages can make: each engine alone, without what it does not need here. An engine that pins a
# torch for CUDA comes from requirements/<engine>_no_deps.txt, without what it depends on.
engine-environments: .venv-vllm/.packages .venv-sglang/.packages

.venv-%/.packages: requirements/%.txt
	test -x .venv-$*/bin/python || $(PYTHON) -m venv .venv-$*
	.venv-$*/bin/python -m pip install -q --disable-pip-version-check -r requirements/$*.txt
	test ! -e requirements/$*_no_deps.txt || \
	  .venv-$*/bin/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/$*_no_deps.txt
	@# Builds for CUDA, which a CPU build of torch cannot load.
	.venv-$*/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

# The book, in build/docs/html. A warning is an error: a broken link, a name that does not exist.
docs: build $(VENV)/.docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs build/docs/html
	$(BIN)/python tools/check_book.py build/docs/html
	@echo build/docs/html/index.html

# The page of all results, from benchmarks/results, as a part of the book.
dashboard: docs
	@echo build/docs/html/_generated/dashboard.html

# Compiles (CUDA too, where there is nvcc) and installs in place.
build: $(VENV)/.packages
	@$(PYTHON) tools/check_machine.py
	. $(BIN)/activate && python setup.py -q build_ext --inplace
	@test -e $(VENV)/.installed || { . $(BIN)/activate && python -m pip install -q --no-build-isolation --no-deps -e .; }
	@touch $(VENV)/.installed

# What can be said without running a kernel: lint, format, types, spelling, sentences of at most 25 words.
check: build
	. $(BIN)/activate && ruff check . && ruff format --check . && mypy && codespell $$(git ls-files) && python tools/plain_english.py
	. $(BIN)/activate && clang-format --dry-run -Werror $$(git ls-files 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

# Ten minutes of random requests in the demo's server: nothing leaks, no text changes.
soak: build
	$(BIN)/python tools/soak.py

# The CPU modules under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: tests, and the fuzzer.
# In pieces: make sanitize SANITIZE="--seconds 900 --state build/sanitized", until nothing is cut any more.
sanitize: $(VENV)/.packages
	. $(BIN)/activate && python tools/sanitize_cpu.py $(SANITIZE)

# The modules for it alone.
sanitizers: $(VENV)/.packages
	. $(BIN)/activate && python tools/sanitize_cpu.py --build-only

# One file for every Python from 3.10 and every torch from 2.10.
wheel: $(VENV)/.packages
	. $(BIN)/activate && env -u ATTNOPS_ARCHS python tools/build_wheel.py dist

sdist: $(VENV)/.packages
	. $(BIN)/activate && python setup.py -q sdist

$(VENV)/.packages: requirements/dev.txt requirements/wheel.txt requirements/no_deps.txt
	@$(PYTHON) tools/check_machine.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/dev.txt -r requirements/wheel.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -r requirements/no_deps.txt
	@touch $@

$(VENV)/.docs: requirements/docs.txt $(VENV)/.packages
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements/docs.txt
	@touch $@

clean:
	rm -rf build docs/_generated dist python/attnops/*.so python/attnops.egg-info
