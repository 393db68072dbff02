# `make demo` and `make test` set everything up by themselves, with plain pip, in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
MINUTES ?= 10
SEED   ?= $(shell date +%s)
GPU_TESTS := $(addprefix tests/,ops/test_gpu.py pipeline/test_side_streams.py train/test_device.py bench/test_convergence.py)

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow fuzz torture gpu-test lint format clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

demo: $(VENV)/.installed-train ## Train a small Llama over a slow link, in FP32 and in 4 bits, side by side
	@$(BIN)/lowbit demo

test: $(VENV)/.installed-dev ## Run the test suite (ARGS="-k codecs" is handed to pytest)
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

test-slow: $(VENV)/.installed-dev ## Run the long tests that `make test` leaves out
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

torture: $(VENV)/.installed-dev ## Hurt real runs at random moments (ARGS="--trials 20 --supervise"); as root, an hour
	@$(BIN)/python -m tests.torture $(ARGS)

gpu-test: ## Run what needs a GPU, with the PyTorch and Triton that PYTHON has; skips without one
	@PYTHONPATH=src $(PYTHON) -m pytest $(GPU_TESTS) $(ARGS)

fuzz: $(VENV)/.installed-dev ## Attack the decoders with hostile bytes for longer than the tests do (MINUTES=10, SEED=...)
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) --jobs 2

lint: $(VENV)/.installed-dev ## Check style, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright

format: $(VENV)/.installed-dev ## Rewrite the files in the project's style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## Remove the environment and the caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist

# One stamp for each set of extras: packages are installed again when the project's requirements change.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing lowbit[$*] into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "error: lowbit needs Python 3.11 or newer as $(PYTHON): make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "error: $(PYTHON) cannot create environments: install its venv module (Debian, Ubuntu: sudo apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
