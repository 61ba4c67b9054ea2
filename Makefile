# Octavo: what a person types. Everything runs from a virtual environment in the checkout.

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
.DEFAULT_GOAL := help
.PHONY: help setup demo test lint chaos kernels test-compose test-load compiled bench clean

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := pyproject.toml constraints.txt

# Of what pip says, the lines that tell a person what it is busy with.
INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[$(1)]' \
	| sed -un -e '/^ *Downloading .*MB/p' -e '/^Processing/p' -e 's/^\(Installing collected packages\):.*/\1 .../p'

help:  ## show this
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name meaning; do printf '  make %-13s %s\n' "$$name" "$$meaning"; done

setup: $(VENV)/stamp-dev  ## install all that development needs into .venv

demo: $(VENV)/stamp-local  ## start a small model and watch a prompt being remembered
	$(BIN)/octavo demo
	@echo "(The commands are in $(BIN): . $(BIN)/activate)"

# In as many processes as there are cores, up to four: many tests wait for processes of theirs. A file's tests stay
# together, since they share what they start; the files are taken in their order, which has the short ones last.
test: setup  ## run the tests (not those that start containers, the load generator, or the chaos run)
	$(BIN)/octavo model fetch
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder \
		-m "not compose and not load and not chaos"

chaos: setup  ## break a fleet under load for two minutes, and look that no request is lost
	$(BIN)/octavo model fetch
	$(BIN)/pytest -m chaos tests/fault

lint: setup  ## check style, types, imports and generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	$(BIN)/python proto/generate.py --check

kernels: setup  ## compile the GPU kernels for every target, without a GPU, and check what became of them
	$(BIN)/python -m bench.ahead_of_time --check

test-compose: setup  ## run the containers for real, with a Docker engine
	PYTHON=$(CURDIR)/$(BIN)/python tests/support/docker/with-engine.sh $(BIN)/pytest -m compose tests/e2e

test-load: setup .venv-load/bin/guidellm  ## put a public load generator before the HTTP API
	$(BIN)/octavo model fetch
	GUIDELLM=$(CURDIR)/.venv-load/bin/guidellm $(BIN)/pytest -m load tests/e2e

# In an environment of its own: what it depends on is none of ours.
.venv-load/bin/guidellm: | $(BIN)/python
	$(BIN)/python -m venv .venv-load
	.venv-load/bin/pip install --quiet --disable-pip-version-check guidellm==0.8.1 torch==2.13.0

compiled: setup  ## build a wheel in which the cache manager's books are compiled, into dist
	OCTAVO_COMPILED=1 PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

bench: setup  ## measure, one JSON object a line
	@for name in memory ledger eviction routing control_plane gateway recovery kernels sampling engine serving http_events; do \
		$(BIN)/python -m bench.$$name; done

clean:  ## remove .venv and what tools and builds left
	rm -rf $(VENV) .venv-load build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are newer than the pins they were installed from. `dev` has all that `local` has.
$(VENV)/stamp-dev: $(PINS) | $(BIN)/python
	@echo "Installing Octavo and its development tools into $(VENV) (minutes, the first time)"
	@$(call INSTALL,dev)
	@touch $(VENV)/stamp-local $@

$(VENV)/stamp-local: $(PINS) | $(BIN)/python
	@echo "Installing Octavo into $(VENV) (minutes, the first time)"
	@$(call INSTALL,local)
	@touch $@

# Debian keeps the part of venv that installs pip in a package of its own.
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Octavo needs Python 3.11 or newer: make PYTHON=/path/to/python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
		if [[ $$(id -u) == 0 ]] && command -v apt-get >/dev/null; then \
			echo "Installing python3-venv"; \
			apt-get -qq update; \
			DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends python3-venv >/dev/null; \
		else \
			echo "$(PYTHON) cannot make virtual environments; on Debian: sudo apt-get install python3-venv"; exit 1; \
		fi; }
	$(PYTHON) -m venv $(VENV)
