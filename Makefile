# SPDX-License-Identifier: BSD-3-Clause
# Everything runs inside .venv, which the first target that needs it creates.

PYTHON ?= python3
ARGS ?=
# A worker that has got most of the random programs hands some to those that have ended.
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist worksteal

VENV := .venv
BIN := $(VENV)/bin
# Machine code that is made at the first steps; clones may have one folder in common.
export PREAMP_CACHE := $(or $(PREAMP_CACHE),$(CURDIR)/$(VENV)/machine-code)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo kernels test test-all test-device test-integrations check bench wheel-test docs clean

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' Makefile

# Threads that wait should sleep: on a busy machine spinning ones slow a step down many times over.
demo: $(VENV)/.ready-demo  ## Train a small GPT at several opt levels; options: make demo ARGS="--steps 20"
	OMP_WAIT_POLICY=passive $(BIN)/python examples/00_demo.py $(ARGS)

kernels: $(VENV)/.ready-dev  ## Compile what the tests take of the kernels, once for all of them
	OMP_NUM_THREADS=1 $(BIN)/python tools/compile_kernels.py

# One thread for each worker: the tests use small tensors, and many threads only fight for cores.
# Bytecode is kept, since tests start many interpreters.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest $(LIMIT) $(PYTEST_ARGS)
# A test that waits for ever, as processes may that wait for each other, says where and ends.
LIMIT = -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
# Frameworks have a target of their own, and warnings that pytest-xdist may fail to pass on.
SUITES = $(PYTEST) --ignore=tests/integrations

test: $(VENV)/.ready-dev  ## Run the tests, with a part of the combinations of their parameters
	$(SUITES)

SUITE ?= all
test-all: $(VENV)/.ready-dev  ## Run all tests with all combinations; SUITE=rest: what test left out
	$(SUITES) --suite $(SUITE)

# Compiles a device of the host's memory, which takes a minute the first time. Its processes find
# preamp in src while the frameworks are installed beside them, which takes it out and puts it back.
test-device: $(VENV)/.ready-dev  ## Run what only CUDA tensors reach on a pretended GPU; needs g++
	PYTHONPATH="$(CURDIR)/tests:$(CURDIR)/src" OMP_NUM_THREADS=1 $(BIN)/python -m pytest \
	  -p devices.pretended.plugin $(LIMIT) $(PYTEST_ARGS) tests/devices

# One process: each framework takes seconds to import, and ranks are forks of the one that has.
test-integrations: $(VENV)/.ready-integrations  ## Run preamp inside of training frameworks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(LIMIT) --suite all tests/integrations

check: $(VENV)/.ready-dev  ## Lint, format, types, architecture, code in the docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/python tools/check_docs.py
	$(PYTEST) --suite all tests/architecture tests/docs

BENCHES ?= step train attribution
bench: $(VENV)/.ready-dev  ## Measure, and print a table; options: make bench BENCHES=step ARGS="--clips both"
	for bench in $(BENCHES); do $(BIN)/python benchmarks/bench_$$bench.py $(ARGS) || exit 1; done
	$(BIN)/python benchmarks/table.py

wheel-test: $(VENV)/.ready-venv  ## Build the wheel and use it in an empty environment
	$(BIN)/python tools/check_wheel.py $(ARGS)

docs: $(VENV)/.ready-docs $(VENV)/.ready-dev  ## Build the documentation into site/
	$(BIN)/python tools/check_docs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## Remove .venv, caches and everything that was built
	rm -rf $(VENV) build dist site preamp-demo.png .pytest_cache .ruff_cache .hypothesis
	find src tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Some systems ship pip without ensurepip; the pip that is there can then fill the environment.
$(VENV)/.ready-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
		|| { echo "preamp needs Python 3.10 or newer; try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) 2>/dev/null \
		|| { $(PYTHON) -m venv --clear --without-pip $(VENV) \
			&& $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@touch $@

$(VENV)/.ready-demo: pyproject.toml constraints.txt $(VENV)/.ready-venv
	$(INSTALL) -e '.[cli,cpu]' matplotlib
	@touch $@

$(VENV)/.ready-dev: pyproject.toml constraints.txt $(VENV)/.ready-venv
	$(INSTALL) -e '.[dev]'
	@touch $@ $(VENV)/.ready-demo

$(VENV)/.ready-integrations: $(VENV)/.ready-dev
	$(INSTALL) -e '.[dev,integrations]'
	@touch $@

$(VENV)/.ready-docs: pyproject.toml constraints.txt $(VENV)/.ready-venv
	$(INSTALL) -e '.[docs]'
	@touch $@
