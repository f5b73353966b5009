# The entry point for developers. `make help` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt
MODEL ?= smollm2
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help install setup quickstart test test-all lint format protos bench up compose-test clean

help:  ## List the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 16

# Two stamps: what a run needs, and on top of it what working on Paceline needs.
$(BIN)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[all]'
	touch $@

$(BIN)/.ready-dev: $(BIN)/.ready
	$(INSTALL) -e '.[all,dev]'
	touch $@

install: $(BIN)/.ready  ## Install what runs need into .venv

setup: $(BIN)/.ready-dev  ## Install everything into .venv, tools for working on it included

ifeq ($(MODEL),sort4)
quickstart: install  ## Train a real small language model, from nothing to a table of results
	paceline run examples/sort4/run.toml --fresh $(ARGS)
else
quickstart: install  ## Train a real small language model, from nothing to a table of results
	python scripts/fetch_smollm2.py
	paceline run examples/quickstart/run.toml --fresh $(ARGS)
endif

test: setup  ## The suites that must always pass (under 12 minutes on two cores)
	scripts/install_browser.sh
	pytest tests -m 'not slow' -n 2 --dist loadfile $(ARGS)

test-all: setup  ## Everything, slow suites included
	scripts/install_browser.sh
	pytest tests -n 2 --dist loadfile $(ARGS)

lint: setup  ## Style, types, imports, sizes, protos, generated code
	ruff check .
	ruff format --check .
	pyright
	lint-imports
	python scripts/check_sizes.py
	buf lint protos
	buf format --diff --exit-code protos
	python scripts/generate_protos.py --check
	python scripts/generate_telemetry_names.py --check
	python scripts/generate_config_docs.py --check
	python scripts/check_breaking.py

format: setup  ## Format code and protos
	ruff check --fix .
	ruff format .
	buf format -w protos

protos: setup  ## Generate stubs, telemetry names and docs/configuration.md
	python scripts/generate_protos.py
	python scripts/generate_telemetry_names.py
	python scripts/generate_config_docs.py

bench: setup  ## The benchmarks behind the README's table
	python benchmarks/stream.py
	python benchmarks/engine.py
	python benchmarks/loop.py

up: install  ## Start every service of the quickstart and keep them up
	paceline up examples/quickstart/run.toml

compose-test: setup  ## Build the images and run them with a real container engine
	scripts/compose_test.sh

clean:  ## Remove the environment and caches, keep runs and models
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
