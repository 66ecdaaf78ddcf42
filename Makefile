# Everything a new user needs: `make test`, `make bench`. The environment is made on first use, in .venv, from the
# pins in constraints.txt, and again when pyproject.toml or constraints.txt change; the native library is built in
# csrc/build, and again when csrc/ changes. Without a C++ compiler everything runs on plain JAX.
SHELL := bash
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

BIN := .venv/bin
STAMP := .venv/.ready
NATIVE := csrc/build/.ready
CSRC := $(shell find csrc -path csrc/build -prune -o -type f -print)
# pytest-xdist workers; `make test WORKERS=0` runs in one process.
WORKERS ?= auto
# More arguments for pytest or for the benchmark: make test ARGS="-k causal -x"
ARGS ?=
RESULTS := bench-results

.PHONY: help setup native test test-all lint format bench clean

help:
	@echo "make test       the quick tests"
	@echo "make test-all   all tests, the slow ones too"
	@echo "make lint       ruff and mypy"
	@echo "make format     what ruff can mend by itself"
	@echo "make bench      attention against JAX and PyTorch in at most three minutes, with a report"
	@echo "make setup      only the environment (.venv)"
	@echo "make native     only the native library (csrc/build); fails where it cannot be built"
	@echo "make clean      removes the environment, the native library, caches and bench-results"

setup: $(STAMP)

# The interpreter of an existing .venv is kept: only what is installed in it changes with the pins.
$(STAMP): pyproject.toml constraints.txt
	@python=$$(scripts/find-python) || exit 1; \
	echo "Setting up .venv with $$python (about a minute)"; \
	$(BIN)/python -c 'import pip' 2>/dev/null || "$$python" -m venv --clear .venv
	@tools="scikit-build-core ninja"; command -v cmake >/dev/null || tools="$$tools cmake"; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt $$tools
	@PROBJAX_NATIVE=0 $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt \
	    --no-build-isolation -e '.[dev]'
	@touch $@

# Where it cannot be built, this says so once and goes on; what does not compile is an error.
$(NATIVE): $(STAMP) scripts/native $(CSRC)
	@scripts/native --optional
	@mkdir -p $(@D) && touch $@

native: $(STAMP)
	@scripts/native

test: $(NATIVE)
	$(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-all: $(NATIVE)
	$(BIN)/python -m pytest -n $(WORKERS) -m "" $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(NATIVE)
	@mkdir -p $(RESULTS)
	@export PROBJAX_TORCH_PYTHON="$$(scripts/find-torch)"; \
	if [ -z "$$PROBJAX_TORCH_PYTHON" ]; then \
	    echo "No PyTorch found: the torch_sdpa rows will say so. To add it, set PROBJAX_TORCH_PYTHON to an interpreter"; \
	    echo "that has torch and numpy, or: python3 -m venv .venv-torch && .venv-torch/bin/pip install torch numpy"; \
	    unset PROBJAX_TORCH_PYTHON; \
	fi; \
	$(BIN)/probjax bench attention --preset quick --output $(RESULTS)/attention.json $(ARGS)
	@$(BIN)/probjax report $(RESULTS)/attention.json -o $(RESULTS)/attention.html

clean:
	rm -rf .venv csrc/build $(RESULTS) .pytest_cache .ruff_cache .mypy_cache .hypothesis
