# The ways into this repository. `make` alone lists them.

PYTHON ?= python3#   what environments are made with
ZERO ?= 2#           make train: the ZeRO stage
STEPS ?=#            make train: optimizer steps; by default the example's
RANKS ?=#            make train: processes; by default one a GPU, or 2 on CPU
OUT ?= runs/gpt#     make train: folder for the loss curves
ARGS ?=#             make train: more options of train.py, such as --seed 1
TESTS ?=#            make test: what to run, as pytest takes it; by default everything
SOAK ?= 600#         make test-long: seconds that a soak takes

BIN := .venv/bin
PACKAGES := $(sort $(patsubst %/pyproject.toml,%,$(wildcard packages/*/pyproject.toml)))
EXAMPLE := packages/ds-engine/examples/gpt
PIP_INSTALL := pip install --quiet --quiet --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help train test test-long lint types imports bench alone clean

help: ## list the targets
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 12
	@echo "Settings, as in make train ZERO=1 STEPS=100:"
	@sed -n 's/^\([A-Z]*\) ?= *\([^#]*\)# */  \1\t/p' $(MAKEFILE_LIST) | expand -t 12

train: .venv/.packages ## install if needed, then train the example: on all GPUs, or 2 processes on CPU
	@ranks=$(RANKS); \
	: $${ranks:=$$($(BIN)/python -c 'import torch; print(torch.accelerator.device_count() or 2)')}; \
	set -x; exec $(BIN)/deepspeed --num_accelerators $$ranks $(EXAMPLE)/train.py \
		--zero $(ZERO) --out $(OUT) $(if $(STEPS),--steps $(STEPS)) $(ARGS)

test: .venv/.dev ## the whole test suite
	$(BIN)/python -m pytest $(TESTS)

test-long: .venv/.dev ## the tests that take minutes, which make test leaves out
	DS_SOAK_SECONDS=$(SOAK) $(BIN)/python -m pytest -m long --timeout 0 $(TESTS)

lint: .venv/.dev ## style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev ## type check
	$(BIN)/mypy $(PACKAGES:%=%/src)

imports: .venv/.dev ## who may import whom
	$(BIN)/lint-imports

bench: .venv/.dev .venv-peers/.async_io ## compare with DDP, FSDP2, DeepSpeed and fio (slow); ARGS go to run.py
	$(BIN)/python tests/bench/run.py $(ARGS)
	$(BIN)/python tests/bench/collectives.py
	$(BIN)/python tests/bench/start.py
	$(BIN)/python tests/bench/nvme.py

alone: $(PACKAGES:packages/%=alone-%) ## each package's tests, installed with only what it declares

clean: ## remove what builds, checks and tests leave behind; environments and runs stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis .coverage*
	find packages tests -name __pycache__ -type d -prune -exec rm -rf {} +

# --- environments: a stamp file each, so that a second run installs nothing

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.packages: constraints.txt $(PACKAGES:%=%/pyproject.toml) | .venv/bin/python
	@echo "Installing the packages into .venv (torch is large: a minute or a few, once)"
	$(BIN)/$(PIP_INSTALL) -c constraints.txt \
		$(foreach package,$(PACKAGES),-e '$(package)$(if $(findstring ds-engine,$(package)),[examples])')
	@touch $@

.venv/.dev: requirements-dev.txt .venv/.packages
	@echo "Installing the tests' and checks' tools into .venv"
	$(BIN)/$(PIP_INSTALL) -c constraints.txt -r requirements-dev.txt
	@touch $@

# DeepSpeed's setup.py imports torch and more, so these come first and its build sees them.
.venv-peers/.deepspeed: constraints.txt
	@echo "Installing DeepSpeed into .venv-peers, apart from ours"
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/$(PIP_INSTALL) -c constraints.txt torch setuptools wheel numpy psutil
	.venv-peers/bin/$(PIP_INSTALL) -c constraints.txt --no-build-isolation deepspeed
	@touch $@

# Compiled by its first import, which nvme.py should not have to wait for. Needs g++ and libaio's headers.
.venv-peers/.async_io: .venv-peers/.deepspeed
	@echo "Compiling DeepSpeed's async_io (minutes, once)"
	@PATH=$(CURDIR)/.venv-peers/bin:$$PATH TORCH_EXTENSIONS_DIR=$(CURDIR)/.venv-peers/torch-extensions \
		.venv-peers/bin/python -c 'from deepspeed.ops.op_builder import AsyncIOBuilder; AsyncIOBuilder().load()' \
		> $@.log 2>&1 && rm $@.log || echo "It can't be compiled, and is left out of nvme.py: see $@.log"
	@touch $@

# --- alone: wheels of our packages, then an environment for each in which pip resolves what it declares

# A constraint by file: a name of ours never comes from an index, where it may be someone else's.
build/wheels/ours.txt: .venv/.packages $(shell find packages -path '*/src/*' -name '*.py') $(PACKAGES:%=%/pyproject.toml)
	@rm -rf build/wheels
	$(BIN)/pip wheel --quiet --quiet --disable-pip-version-check --no-deps -w build/wheels $(PACKAGES:%=./%)
	@for wheel in $(CURDIR)/build/wheels/*.whl; do \
		name=$$(basename $$wheel); echo "$$(echo $${name%%-*} | tr _ -) @ file://$$wheel"; done > $@

TEST_TOOLS := pytest pytest-timeout hypothesis
# torch installed by itself brings no NumPy and says so, and warnings are errors in our tests.
ALONE_PYTEST := python -m pytest -q -W "ignore:Failed to initialize NumPy:UserWarning"

# Most of an environment is torch: packages that declare it start from a copy of this one.
build/alone/torch/.installed: constraints.txt
	@rm -rf $(@D) && $(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m $(PIP_INSTALL) --no-compile -c constraints.txt torch $(TEST_TOOLS)
	@touch $@

.PHONY: $(PACKAGES:packages/%=alone-%)
$(PACKAGES:packages/%=alone-%): alone-%: build/wheels/ours.txt build/alone/torch/.installed
	@echo "== $* alone"
	@rm -rf build/alone/$*
	@if grep -q '^dependencies.*"torch' packages/$*/pyproject.toml; \
		then cp -a build/alone/torch build/alone/$*; else $(PYTHON) -m venv build/alone/$*; fi
	@build/alone/$*/bin/python -m $(PIP_INSTALL) --no-compile \
		-c constraints.txt -c build/wheels/ours.txt $* $(TEST_TOOLS)
	build/alone/$*/bin/$(ALONE_PYTEST) packages/$*/tests
	@rm -rf build/alone/$*
