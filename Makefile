# Everything a developer types. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.7
ZIG_VERSION := 0.17.0
AIRFLOW_VENV := build/airflow-venv
DOCS_VENV := build/docs-venv

.PHONY: help setup demo demo-bucket test docs soak airflow bench screenshots wheel lint format lock clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.kernels ## make .venv: locked dependencies, the project, compiled kernels

demo: setup ## a first look: a stream into a topic, killed and restarted, and its state restored
	@$(BIN)/python -m duramen.demo

demo-bucket: setup ## the same with a store in a bucket, and the requests of each micro-batch
	@$(BIN)/python -m duramen.demo_bucket

test: setup ## every suite, then a table of them; SUITES="unit lint" runs only those
	@$(BIN)/python tests/suites.py $(SUITES)

docs: $(DOCS_VENV)/.setup ## build/site/: the documentation as a web site; warnings are errors
	@$(PYTHON) tests/docs/pictures.py || { echo "The console's page has changed: taking its pictures"; $(MAKE) screenshots; }
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	@echo "Open build/site/index.html; for its search: python3 -m http.server --directory build/site"

soak: setup ## the long runs: ten million fuzz cases, hours of crashes
	@$(BIN)/python tests/suites.py --soak $(SUITES)

airflow: setup $(AIRFLOW_VENV)/.setup ## the DAGs in a real Airflow, which has an environment of its own
	@$(BIN)/python tests/suites.py airflow

bench: setup ## speed and memory, side by side with Kafka's own log class; ARGS="..." is passed on
	@$(BIN)/python -m bench $(ARGS)

screenshots: setup ## docs/images/: the pictures of the console, taken anew by its tests
	@$(BIN)/python -m pytest -q tests/console/browser/test_screenshots.py
	@$(BIN)/python tests/docs/pictures.py --keep

wheel: setup ## dist/: the wheel with compiled kernels, and the sdist; MACHINE=aarch64 builds for another machine
	@$(if $(MACHINE),[ "$(MACHINE)" = "$$(uname -m)" ] || $(BIN)/python -m pip install --quiet \
	    --disable-pip-version-check ziglang==$(ZIG_VERSION))
	@DURAMEN_WHEEL_MACHINE=$(MACHINE) $(BIN)/python tests/package/build.py dist
	@ls dist

lint: setup ## ruff and mypy, changing nothing
	@$(BIN)/python tests/suites.py lint

format: setup ## let ruff rewrite the code
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .

# uv resolves for every Python at once, which pip cannot; nothing but this target uses it. Pins stay as they are unless
# UPGRADE=1. The extras are only resolved, to see that they still fit together with the rest.
COMPILE = build/lock/bin/uv pip compile --quiet --universal --python-version 3.10 --no-emit-index-url \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade)
lock: build/lock/bin/uv ## write requirements*.lock anew from pyproject.toml; UPGRADE=1 moves the pins
	@$(COMPILE) pyproject.toml --generate-hashes -o requirements.lock > /dev/null
	@$(COMPILE) pyproject.toml --generate-hashes --group dev --extra spark --extra delta -c requirements.lock \
	    -o requirements-dev.lock > /dev/null
	@$(COMPILE) pyproject.toml --group dev --all-extras -c requirements.lock > /dev/null
	@$(COMPILE) --group docs --generate-hashes -c requirements-dev.lock -o requirements-docs.lock > /dev/null
	@$(COMPILE) airflow_dags/requirements.in --generate-hashes -o requirements-airflow.lock > /dev/null
	@git --no-pager diff --stat -- 'requirements*.lock'

clean: ## remove what was built, but not .venv
	@rm -rf build dist ./*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis tests/conformance/target
	@find . -path ./$(VENV) -prune -o -type d -name __pycache__ -prune -exec rm -rf {} +
	@rm -f $(VENV)/.kernels $(VENV)/.setup

# The first interpreter that is new enough. PYTHON=... overrules the search.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11 python3.10,$(shell \
	$(name) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2> /dev/null && echo $(name))))

define NO_PYTHON
Duramen needs Python 3.10 or newer, and found none. Install it and try again:
    apt-get install python3 python3-venv
endef
define NO_VENV
This Python cannot make virtual environments. Install the missing part and try again:
    apt-get install python3-venv
endef
export NO_PYTHON NO_VENV

# A lock file is complete, so nothing is resolved: pip would look at newer releases of a pinned package when another one
# asks for it with an extra, and refuse them for their missing hash.
FROM_LOCK := --quiet --disable-pip-version-check --no-deps --require-hashes -r

$(VENV)/.setup: pyproject.toml requirements-dev.lock
	@if [ ! -x $(BIN)/python ]; then \
	    [ -n "$(PYTHON)" ] || { echo "$$NO_PYTHON" >&2; exit 1; }; \
	    $(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { echo "$$NO_VENV" >&2; exit 1; }; \
	    echo "Making $(VENV) with $$($(PYTHON) --version)"; \
	    $(PYTHON) -m venv $(VENV); \
	fi
	@echo "Installing the locked dependencies (a minute or two the first time)"
	@$(BIN)/python -m pip install $(FROM_LOCK) requirements-dev.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

# Airflow's pins clash with those of Spark's Python, so it never shares an environment with the project. Made anew when
# its lock changes; the tests of the DAGs ask for it themselves, too.
$(AIRFLOW_VENV)/.setup: requirements-airflow.lock
	@echo "Making Airflow's environment, $(AIRFLOW_VENV) (a minute or two)"
	@$(PYTHON) -m venv --clear $(AIRFLOW_VENV)
	@$(AIRFLOW_VENV)/bin/python -m pip install $(FROM_LOCK) requirements-airflow.lock
	@touch $@

# The site needs neither Spark nor the engine's dependencies, so it has a small environment of its own.
$(DOCS_VENV)/.setup: requirements-docs.lock
	@[ -n "$(PYTHON)" ] || { echo "$$NO_PYTHON" >&2; exit 1; }
	@echo "Making the environment of the documentation, $(DOCS_VENV) (half a minute)"
	@$(PYTHON) -m venv --clear $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install $(FROM_LOCK) requirements-docs.lock
	@touch $@

# Compiling takes seconds, and far longer when several processes do it at once, so it is done here, once.
$(VENV)/.kernels: $(VENV)/.setup $(shell find logstore/records -name '*.py')
	@if [ -e logstore/records/native.py ] || [ -d logstore/records/native ]; then \
	    echo "Compiling the kernels"; \
	    $(BIN)/python -m logstore.records.native --warm; \
	fi
	@touch $@

build/lock/bin/uv:
	@[ -n "$(PYTHON)" ] || { echo "$$NO_PYTHON" >&2; exit 1; }
	@$(PYTHON) -m venv build/lock
	@build/lock/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
