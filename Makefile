# make build   the environment in .venv and the extension in place
# make demo    the same, then the main job: examples/decoder.py eager, compiled, under Trident
# make test    the same, then the tests          make lint    ruff and mypy
# make test-ops  all of PyTorch's own samples of its operators, some hours
# make bench   the same, then the benchmarks     make clean   removes what was built, not .venv
#
# Variables:  PYTHON=python3.12   TORCH="torch==2.11.0"   TESTS="tests/codegen -k golden"
#             DEMO="--steps 50"   PIP_FLAGS="--extra-index-url ..."

PYTHON ?= python3
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
TESTS ?=
DEMO ?=
BENCH ?= bench
OPS ?=

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := build
.DELETE_ON_ERROR:
.PHONY: build demo test test-ops lint bench bench-gpu tables clean

VENV := .venv
RUN := $(VENV)/bin/python
# The stamps carry the torch requirement: another TORCH= installs and builds anew.
TORCH_ID := $(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.\n' '-')
DEPS := $(VENV)/.deps-$(TORCH_ID)
BUILT := $(VENV)/.built-$(TORCH_ID)
SOURCES := setup.py pyproject.toml $(wildcard trident/*.pyx trident/*.pxd trident/*.pxi) \
    $(wildcard trident/runtime/*)

define say
@printf '\n\033[1m==> %s\033[0m\n' $(1)
endef

build: $(BUILT)

# Debian splits venv and headers from python3: root gets them installed, others are told the command.
$(RUN):
	$(call say,"creating $(VENV) with $$($(PYTHON) --version)")
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	    { echo "Trident needs Python 3.11 to 3.13; choose one with: make PYTHON=python3.12"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv, os, sysconfig as s; \
	    raise SystemExit(not os.path.exists(s.get_paths()["include"] + "/Python.h"))' 2>/dev/null || \
	    { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq && \
	      apt-get install -y --no-install-recommends python3-venv python3-dev; } || \
	    { echo "$(PYTHON) has no venv module or no Python.h; on Debian:" \
	           "apt-get install python3-venv python3-dev"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEPS): requirements.txt | $(RUN)
	$(call say,"installing $(TORCH) and requirements.txt (the first time this takes minutes)")
	$(RUN) -m pip install --disable-pip-version-check $(PIP_FLAGS) '$(TORCH)' -r requirements.txt
	@rm -f $(VENV)/.deps-* $(VENV)/.built-* && touch $@

$(BUILT): $(DEPS) $(SOURCES)
	$(call say,"building the extension in place")
	$(RUN) setup.py build_ext --inplace
	@$(RUN) -c 'from importlib.metadata import entry_points as e; \
	    raise SystemExit(not e(group="torch_dynamo_backends", name="trident"))' || \
	    $(RUN) -m pip install --disable-pip-version-check -q --no-build-isolation --no-deps -e .
	@touch $@

demo: build
	$(call say,"the main job: examples/decoder.py")
	$(RUN) examples/demo.py $(DEMO)

test: build
	$(call say,"tests")
	$(RUN) -m pytest -n auto --dist loadfile $(TESTS)

test-ops: build
	$(call say,"PyTorch's own samples of its operators: some hours; OPS=\"--every 10\" takes a part")
	$(RUN) -m tests.op_samples $(OPS)

lint: $(DEPS)
	$(call say,"lint")
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: build
	$(call say,"benchmarks")
	$(RUN) -m pytest $(BENCH) --benchmark-only
	$(RUN) -m bench.tables

bench-gpu: build
	$(call say,"benchmarks of Triton's kernels, for a machine with a GPU")
	$(RUN) -m pytest bench/test_triton.py --benchmark-only

tables: build
	$(RUN) -m bench.tables

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f trident/*.so trident/_frame.cpp trident/_build_info.py $(VENV)/.built-*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
