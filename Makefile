# make demo    train a small model to add two-digit numbers (about 5 minutes on two cores)
# make test    lint, types, tests
#
# Needs Python 3.11 or newer and a package index, nothing else; everything goes into .venv, .venvs, .cache and runs of
# this folder.
# Another interpreter: make PYTHON=/path/to/python demo

PYTHON ?=
CANDIDATES = $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14 python)
VENV := .venv
BIN := $(VENV)/bin
PEERS := .venvs/peers
VERIFIERS := .venvs/verifiers
CODE := src tests benchmarks recipes
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

# Compiled programs are kept between runs, so only the first one waits for the compiler.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
# Models that were fetched. To share those that you have: make LOCKSTEP_CACHE=~/.cache/lockstep demo
export LOCKSTEP_CACHE ?= $(CURDIR)/.cache/lockstep

.DEFAULT_GOAL := help
.PHONY: help demo demo-short model test test-one test-other test-slow test-peers test-verifiers lint types check-format format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: model
	$(BIN)/lockstep run recipes/addition.toml

# Two steps of the demo, as CI runs it. Its earlier results are of no value.
demo-short: model
	rm -rf runs/ci-demo
	$(BIN)/lockstep run recipes/addition.toml --run.steps 2 --run.name ci-demo

# make model    fetch and verify the demo's model (98 MB, once)
model: $(VENV)/.installed
	$(BIN)/lockstep models fetch smollm2-135m

# Two processes of tests side by side, and the types: a test keeps about one core busy. Each has its own compiled programs.
ONE := tests/train tests/service tests/models
test: lint
	@$(MAKE) --no-print-directory -j3 types test-one test-other

test-one: $(VENV)/.installed-test
	$(BIN)/pytest -m "not slow" $(ONE)

test-other: $(VENV)/.installed-test
	JAX_COMPILATION_CACHE_DIR=$(JAX_COMPILATION_CACHE_DIR)/other $(BIN)/pytest -m "not slow" $(ONE:%=--ignore=%)

# make test-slow    the tests that take minutes, and the properties on new random examples
test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -m "slow or hypothesis" --hypothesis-profile=search

# make test-peers    compare models and chat templates with transformers itself, in .venvs/peers (a large download)
# For checking against transformers only; nothing else uses it. The extra pins torch, because logits are compared within a
# bound. The default torch for Linux brings CUDA; with PIP_EXTRA_INDEX_URL set to torch's CPU index it does not.
test-peers: $(PEERS)/.installed
	$(PEERS)/bin/pytest tests/models/test_parity_live.py

# make test-verifiers    play environments of the library verifiers, in .venvs/verifiers (a large download)
test-verifiers: $(VERIFIERS)/.installed
	$(VERIFIERS)/bin/pytest tests/envs/test_verifiers.py

lint: check-format
	$(BIN)/ruff check $(CODE)

check-format: $(VENV)/.installed-test
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/.installed-test
	$(BIN)/mypy

# make format    lay the code out as `make test` wants it
format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

# make clean    remove what was installed and compiled (runs, fetched models and other folders of .venvs are kept)
clean:
	rm -rf $(VENV) $(PEERS) $(VERIFIERS) .cache/jax build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# ---- installation: done again when pyproject.toml changes

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	@echo "installing lockstep into $(VENV) (a minute or two)"
	$(PIP) install --editable '.[tasks]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.made pyproject.toml
	@echo "installing lockstep and what its tests need into $(VENV) (a minute or two)"
	$(PIP) install --editable '.[test]'
	@touch $@ $(VENV)/.installed

.venvs/%/.installed: $(VENV)/.made pyproject.toml
	@echo "installing lockstep and its extra '$*' into .venvs/$* (minutes)"
	rm -rf .venvs/$*
	$(BIN)/python -m venv .venvs/$*
	.venvs/$*/bin/python -m pip --quiet --disable-pip-version-check --no-input install --editable '.[$*,test]'
	@touch $@

$(VENV)/.made:
	@found=; for python in $(CANDIDATES); do \
		if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then found=$$python; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "error: lockstep needs Python 3.11 or newer; none of these is: $(CANDIDATES)." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11" >&2; exit 1; \
	fi; \
	rm -rf $(VENV); \
	"$$found" -m venv $(VENV) || { rm -rf $(VENV); \
		echo "error: $$found cannot make a virtual environment (on Debian and Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@touch $@
