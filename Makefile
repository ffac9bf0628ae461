# make demo    train a small model to add two-digit numbers (about 5 minutes on two cores)
# make test    lint, types, tests
#
# Needs Python 3.11 or newer and a package index, nothing else; everything goes into .venv and .cache of this folder.
# Another interpreter: make PYTHON=/path/to/python demo

PYTHON ?=
CANDIDATES = $(or $(PYTHON),python3.11 python3 python3.12 python3.13 python3.14 python)
VENV := .venv
BIN := $(VENV)/bin
CODE := src tests benchmarks recipes
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input

# Compiled programs are kept between runs, so only the first one waits for the compiler.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax

.DEFAULT_GOAL := help
.PHONY: help demo demo-short test test-slow lint types check-format format clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

demo: $(VENV)/.installed
	$(BIN)/lockstep run recipes/addition.toml

# Two steps of the demo, as CI runs it. Its earlier results are of no value.
demo-short: $(VENV)/.installed
	rm -rf runs/ci-demo
	$(BIN)/lockstep run recipes/addition.toml --run.steps 2 --run.name ci-demo

test: lint types
	$(BIN)/pytest -m "not slow"

# make test-slow    the tests that take minutes
test-slow: $(VENV)/.installed-test
	$(BIN)/pytest -m slow

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

# make clean    remove what can be made again (runs are kept)
clean:
	rm -rf $(VENV) .cache build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# ---- installation: done again when pyproject.toml changes

$(VENV)/.installed: $(VENV)/.made pyproject.toml
	@echo "installing lockstep into $(VENV) (a minute or two)"
	$(PIP) install --editable '.[tasks]'
	@touch $@

$(VENV)/.installed-test: $(VENV)/.made pyproject.toml
	@echo "installing lockstep and what its tests need into $(VENV) (a minute or two)"
	$(PIP) install --editable '.[test]'
	@touch $@ $(VENV)/.installed

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
