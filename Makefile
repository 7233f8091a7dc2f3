# Every target does its own set-up; a second run only does what has changed.
#   make demo    run the main job: a notebook trains on two workers     make lab            JupyterLab on the notebooks
#   make test    lint and tests                                         make bench          benchmarks
#   make test-ecosystem  transformers, TRL, PEFT, diffusers train under the alias as they do under accelerate
#   make nightly long tests, real code, and faults at length: chaos     make test-trackers  trackers with their packages
#   make test-engines  cells on several machines: Ray, ssh, Slurm
#   make lint    all checks of style and types                          make format         apply the formatters
#   make docs    the documentation, into out/docs                       make test-xla       PyTorch/XLA on its CPU device
#   make dist    source archive and wheel, into dist                    make coverage       all tests, and the lines they run
#   make gpu     tests that need a GPU
#   make test-environments  what users do, on Colab's and Kaggle's packages, the oldest and newest versions, a plain install

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
# `make unit-python TORCH=2.10.0` in a fresh clone installs and tests another torch.
TORCH := $(shell sed -n 's/^torch==//p' .ci/constraints.txt)
INSTALL = $(PIP) install -c <(sed 's/^torch==.*/torch==$(TORCH)/' .ci/constraints.txt)
STAMPS := $(VENV)/.stamps
PACKAGE := $(BIN)/jlpm run
BUNDLE := accel_nb/ui/static/widget.js
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_ROOT_USER_ACTION := ignore
export PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD := 1
# Tests start hundreds of processes: with this variable set, each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

# The trackers' packages are many and conflict with the project's: they get a separate environment that also reads the
# packages of the project's.
TRACKERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/accel_nb/trackers

FRONT_END := $(shell find labextension/src labextension/style -type f 2>/dev/null) labextension/tsconfig.json labextension/install.json

# The same for engines on several nodes.
ENGINES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/accel_nb/engines

# The same for the packages that train by accelerate.
ECOSYSTEM := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/accel_nb/ecosystem

# PyTorch/XLA needs another version of torch (7 GB): one environment for all clones of this repository.
XLA := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/accel_nb/xla

.PHONY: help setup demo docs test test-trackers test-engines test-ecosystem test-xla test-environments check-environments gpu xla-env nightly coverage lab bench lint lint-python lint-front-end format \
    clean browser unit unit-python unit-front-end wheel dist

help:
	@sed -n '2,11p' Makefile | sed 's/^# *//'

# Python's packages, those of the front end and the browser come from different servers: they are loaded at the same time.
setup:
	@$(MAKE) --no-print-directory --jobs 3 $(STAMPS)/develop browser

# --- set-up, one stamp a step --------------------------------------------------------------------------------------
#
# `runtime` is what a user installs, and enough for the demo: no Node.js, no JupyterLab. `develop` adds the tools, the
# tests' packages and the built front end.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "Python 3.10 or newer is needed, and $(PYTHON) is not: name another with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# The build back end is in the environment itself, so the package is installed without a second download. Modules are
# compiled when they are first imported. The front end is not built here: without it the panel is drawn as pictures.
$(STAMPS)/runtime: pyproject.toml package.json .ci/constraints.txt .ci/requirements.py | $(BIN)/python
	@mkdir -p $(STAMPS)
	$(INSTALL) --no-compile hatchling editables hatch-nodejs-version hatch-jupyter-builder \
	    --requirement <($(BIN)/python .ci/requirements.py demo)
	SKIP_JUPYTER_BUILDER=1 $(PIP) install --quiet --no-build-isolation --no-deps -e .
	@touch $@

# JupyterLab contains the package manager of the front end.
$(STAMPS)/jlpm: $(STAMPS)/runtime
	$(INSTALL) --no-compile --requirement <($(BIN)/python .ci/requirements.py dev | grep '^jupyterlab')
	@touch $@

# Tests start hundreds of processes, several at a time: what they import is compiled before the first of them. Templates
# that packages ship as .py files do not compile, and that is no error.
NOT_IMPORTED := /(tests?|testing|pip|setuptools|cfnlint|transformers/models|moto/[a-rt-z][^/]*|networkx/algorithms)/
$(STAMPS)/python: $(STAMPS)/jlpm
	$(INSTALL) --no-compile --requirement <($(BIN)/python .ci/requirements.py dev)
	$(BIN)/python -m compileall -q -j 0 -x '$(NOT_IMPORTED)' $(VENV)/lib || true
	@touch $@

$(STAMPS)/node: package.json yarn.lock .yarnrc.yml $(STAMPS)/jlpm
	@command -v node >/dev/null || { echo "Node.js 20 or newer is needed (Debian: apt-get install nodejs)"; exit 1; }
	$(BIN)/jlpm install --immutable
	@touch $@

$(BUNDLE): $(STAMPS)/node $(STAMPS)/python $(FRONT_END)
	rm -rf labextension/lib accel_nb/labextension
	$(PACKAGE) build:prod
	@touch $@

$(STAMPS)/develop: $(STAMPS)/python | $(BUNDLE)
	$(BIN)/jupyter-builder develop --overwrite .
	@touch $@

browser:
	@.ci/browser.sh

# --- what people run -----------------------------------------------------------------------------------------------

demo: $(STAMPS)/runtime
	$(BIN)/python -m accel_nb.cli demo

# Each check uses one processor; the tests use all of them.
test: setup
	$(MAKE) --jobs 2 lint docs wheel unit-front-end
	$(MAKE) unit-python

docs: $(STAMPS)/develop
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: unit-python unit-front-end

# Many processes share the processors: a waiting OpenMP thread must sleep instead of spinning. Tests wait for processes
# that start for a third of their time, so there are two for each processor.
NUM_TESTS = $(shell $(BIN)/python -c "import os; print(min(4, 2 * os.cpu_count()))")
PARALLEL = --numprocesses $(NUM_TESTS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
unit-python coverage: export OMP_WAIT_POLICY = passive

unit-python: setup
	$(BIN)/python -m pytest $(PARALLEL)

# The figures are printed also when a test fails; tests of memory and time may, since measuring costs both.
coverage: setup
	rm -rf out/coverage
	@mkdir -p out/coverage
	$(BIN)/coverage run -m pytest $(PARALLEL) || failed=1; \
	    $(BIN)/coverage combine --quiet && $(BIN)/coverage html --quiet && $(BIN)/coverage report; \
	    exit $${failed:-0}

unit-front-end: $(STAMPS)/develop
	$(PACKAGE) test

test-trackers: $(STAMPS)/develop
	@.ci/environment.sh $(BIN)/python $(TRACKERS) .ci/trackers.txt
	$(TRACKERS)/bin/python -m pytest tests/trackers

test-engines: $(STAMPS)/develop
	@.ci/environment.sh $(BIN)/python $(ENGINES) .ci/engines.txt
	@.ci/servers.sh
	$(ENGINES)/bin/python -m pytest tests/engines $(TESTS)

test-ecosystem: $(STAMPS)/develop
	@.ci/environment.sh $(BIN)/python $(ECOSYSTEM) .ci/ecosystem.txt
	$(ECOSYSTEM)/bin/python -m pytest tests/ecosystem $(TESTS)

# The other environment gets a copy of this package's metadata (entry points, version), and the package by its path.
test-xla: xla-env $(STAMPS)/develop
	cp -R $(VENV)/lib/python3*/site-packages/accel_nb-*.dist-info $(XLA)/lib/python3*/site-packages/
	PYTHONPATH=$(CURDIR) $(XLA)/bin/python -m pytest tests/xla --timeout 600

xla-env: $(XLA)/.installed

$(XLA)/.installed: .ci/xla.sh .ci/constraints.txt pyproject.toml
	.ci/xla.sh $(PYTHON) $(XLA)

# `make test-environments ENVIRONMENTS=colab` runs one. Each is a venv in the cache folder, built when its list changes.
ENVIRONMENTS := colab kaggle oldest newest laptop
test-environments: $(STAMPS)/develop
	$(BIN)/python .ci/environments.py run $(ENVIRONMENTS) --tests $(or $(TESTS),tests/environments tests/ranks tests/contract tests/realworld)

# What users do on Colab and after a plain install, where these environments stand already.
check-environments: $(STAMPS)/develop
	$(BIN)/python .ci/environments.py check colab laptop

# Needs a GPU, and fails without one.
gpu: $(STAMPS)/develop
	@$(BIN)/python -c 'import sys, torch; torch.cuda.is_available() or sys.exit("make gpu: torch finds no GPU here")'
	$(BIN)/python -m pytest tests/gpu

REALWORLD := REALWORLD=all $(BIN)/python -m pytest tests/realworld --numprocesses logical --maxprocesses 4 --dist loadscope

nightly: export OMP_WAIT_POLICY = passive
nightly: setup
	$(BIN)/python -m pytest -m nightly $(PARALLEL)
	RANDOM_LOOPS=3000 RANDOM_SESSIONS=1000 $(BIN)/python -m pytest tests/properties --numprocesses logical --maxprocesses 4 --dist load \
	    --timeout 3600
	$(REALWORLD)
	REALWORLD_FLAGS="--strategy fsdp" $(REALWORLD) -k "not deepspeed"
	REALWORLD_FLAGS="--strategy deepspeed" REALWORLD_DTYPE=float32 $(REALWORLD) -k "not sharded"
	REALWORLD_FLAGS="--strategy deepspeed --zero-stage 3" REALWORLD_DTYPE=float32 $(REALWORLD) -k "not sharded"
	REALWORLD_FLAGS="--accumulate 2" REALWORLD_YARDSTICK="--accumulate 2" $(REALWORLD) -k "not sharded and not deepspeed"
	KILLS=200 $(BIN)/python -m pytest tests/faults/test_checkpoint.py -k kill --timeout 3600
	MESH=all $(BIN)/python -m pytest -m "nightly or not nightly" tests/ranks/test_mesh.py tests/ranks/test_pipeline.py \
	    tests/ranks/test_sequences.py tests/ranks/test_experts.py tests/ranks/test_pipeline_schedules.py \
	    tests/ranks/test_mesh_laws.py tests/notebook/test_mesh_kills.py --timeout 3600
	FUZZ=15000 $(BIN)/python -m pytest tests/unit/test_fuzz.py --timeout 3600
	$(MAKE) test-environments
	$(BIN)/python -m tests.faults.chaos
	$(BIN)/python -m tests.faults.soak

wheel: $(STAMPS)/develop
	.ci/check_wheel.sh

dist: $(STAMPS)/develop
	rm -f accel_nb/labextension/install.json
	$(BIN)/python -m build --no-isolation --outdir dist .

lab: $(STAMPS)/develop
	$(BIN)/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

bench: $(STAMPS)/develop browser
	@.ci/environment.sh $(BIN)/python $(ENGINES) .ci/engines.txt
	$(BIN)/python -m benchmarks

lint: lint-python lint-front-end

lint-python: $(STAMPS)/develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python .ci/words.py

lint-front-end: $(STAMPS)/develop
	$(PACKAGE) lint:check

format: $(STAMPS)/develop
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(PACKAGE) lint

clean:
	rm -rf out dist build labextension/lib accel_nb/labextension $(BUNDLE) $(STAMPS)
	find accel_nb tests -name __pycache__ -type d -prune -exec rm -rf {} +
