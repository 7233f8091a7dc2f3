# Every target does its own set-up; a second run only does what has changed.
#   make demo    run the main job: a notebook trains on two workers     make lab            JupyterLab on the notebooks
#   make test    lint and all tests                                     make bench          benchmarks
#   make nightly real code, and faults at length: chaos, kills, fuzz    make test-trackers  trackers with their packages
#   make lint    all checks of style and types                          make format         apply the formatters
#   make docs    the documentation, into out/docs                       make test-xla       PyTorch/XLA on its CPU device

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMPS := $(VENV)/.stamps
PACKAGE := $(BIN)/jlpm run
BUNDLE := accel_nb/ui/static/widget.js
export PATH := $(CURDIR)/$(BIN):$(PATH)
export PIP_ROOT_USER_ACTION := ignore
export PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD := 1
# Tests start hundreds of processes: each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

# Trackers' packages are many and want versions of their own: they have an environment apart, which sees the project's.
TRACKERS := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/accel_nb/trackers

FRONT_END := $(shell find labextension/src labextension/style -type f 2>/dev/null) labextension/tsconfig.json labextension/install.json

# PyTorch/XLA needs a torch of its own (7 GB): one environment for every copy of this repository.
XLA := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/accel_nb/xla

.PHONY: help setup demo docs test test-trackers test-xla xla-env nightly lab bench lint lint-python lint-front-end format \
    clean browser unit unit-python unit-front-end wheel

help:
	@sed -n '2,7p' Makefile | sed 's/^# *//'

setup: $(STAMPS)/develop browser

# --- set-up, one stamp a step --------------------------------------------------------------------------------------

$(BIN)/python:
	@command -v node >/dev/null || { echo "Node.js 20 or newer is needed (Debian: apt-get install nodejs)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(STAMPS)/torch: .ci/constraints.txt | $(BIN)/python
	@mkdir -p $(STAMPS)
	$(PIP) install -c .ci/constraints.txt torch==2.13.0
	@touch $@

# The build back end is wanted in the environment itself: the package is then installed without a second download.
$(STAMPS)/python: pyproject.toml .ci/constraints.txt $(STAMPS)/torch
	$(PIP) install -c .ci/constraints.txt hatchling editables hatch-nodejs-version hatch-jupyter-builder jupyter-builder
	$(PIP) install -c .ci/constraints.txt --requirement <($(BIN)/python .ci/requirements.py)
	@touch $@

$(STAMPS)/node: package.json yarn.lock .yarnrc.yml $(STAMPS)/python
	$(BIN)/jlpm install --immutable
	@touch $@

$(BUNDLE): $(STAMPS)/node $(FRONT_END)
	rm -rf labextension/lib accel_nb/labextension
	$(PACKAGE) build:prod
	@touch $@

# The front end is built by now, so the hook of the Python build finds it and does not build it again.
$(STAMPS)/develop: pyproject.toml package.json $(STAMPS)/python | $(BUNDLE)
	$(PIP) install --no-build-isolation --no-deps -e .
	$(BIN)/jupyter-builder develop --overwrite .
	@touch $@

browser:
	@.ci/browser.sh

# --- what people run -----------------------------------------------------------------------------------------------

demo: $(STAMPS)/develop
	$(BIN)/python -m accel_nb.cli demo

# The checks take one processor each, the tests all that there are.
test: setup
	$(MAKE) --jobs 2 lint docs wheel unit-front-end
	$(MAKE) unit-python

docs: $(STAMPS)/develop
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: unit-python unit-front-end

# Many processes share the processors: a thread of theirs that waits for the others must not keep one busy.
unit-python: export OMP_WAIT_POLICY = passive
unit-python: setup
	$(BIN)/python -m pytest --numprocesses logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

unit-front-end: $(STAMPS)/develop
	$(PACKAGE) test

test-trackers: $(STAMPS)/develop
	@.ci/trackers.sh $(BIN)/python $(TRACKERS)
	$(TRACKERS)/bin/python -m pytest tests/trackers

# The other environment gets this package's metadata (its strategies, its version), and the package itself by path.
test-xla: xla-env $(STAMPS)/develop
	cp -R $(VENV)/lib/python3*/site-packages/accel_nb-*.dist-info $(XLA)/lib/python3*/site-packages/
	PYTHONPATH=$(CURDIR) $(XLA)/bin/python -m pytest tests/xla --timeout 600

xla-env: $(XLA)/.installed

$(XLA)/.installed: .ci/xla.sh .ci/constraints.txt pyproject.toml
	.ci/xla.sh $(PYTHON) $(XLA)

nightly: export OMP_WAIT_POLICY = passive
nightly: $(STAMPS)/develop
	REALWORLD=all $(BIN)/python -m pytest tests/realworld --numprocesses logical --maxprocesses 4 --dist loadscope
	KILLS=200 $(BIN)/python -m pytest tests/faults/test_checkpoint.py -k kill --timeout 3600
	FUZZ=15000 $(BIN)/python -m pytest tests/unit/test_fuzz.py --timeout 3600
	$(BIN)/python -m tests.faults.chaos
	$(BIN)/python -m tests.faults.soak

wheel: $(STAMPS)/develop
	.ci/check_wheel.sh

lab: $(STAMPS)/develop
	$(BIN)/jupyter lab --notebook-dir=notebooks $(if $(filter 0,$(shell id -u)),--allow-root)

bench: $(STAMPS)/develop browser
	$(BIN)/python -m benchmarks

lint: lint-python lint-front-end

lint-python: $(STAMPS)/develop
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

lint-front-end: $(STAMPS)/develop
	$(PACKAGE) lint:check

format: $(STAMPS)/develop
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(PACKAGE) lint

clean:
	rm -rf out dist build labextension/lib accel_nb/labextension $(BUNDLE) $(STAMPS)
	find accel_nb tests -name __pycache__ -type d -prune -exec rm -rf {} +
