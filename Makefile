# make all: environment and default study. make test: environment and tests.
# TORCH_INDEX: another package index for torch. On Linux without a GPU the CPU builds save gigabytes.

PYTHON ?= python3
TORCH_INDEX ?=
CONFIG ?=

VENV := .venv
BIN := $(VENV)/bin
INDEX := $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)")
STUDY := $(if $(CONFIG),--configfile "$(CONFIG)")

.PHONY: all test lint format report

all: $(VENV)/ready
	$(BIN)/python -m snakemake --cores 1 all $(STUDY)

test: $(VENV)/ready
	$(BIN)/python -m pytest

lint: $(VENV)/ready
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m snakefmt --check Snakefile rules
	$(BIN)/python -m snakemake --lint

format: $(VENV)/ready
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/python -m snakefmt Snakefile rules

report: $(VENV)/ready
	$(BIN)/python -m snakemake --report report.html $(STUDY)

# The environment is made anew only when what it is made from has changed.
$(VENV)/ready: pyproject.toml envs/constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(INDEX) -c envs/constraints.txt '.[torch,mlx,dev]'
	touch $@
