# Targets: venv, train, test, slow, nightly, lint, bench, docs. Everything runs in $(VENV); make creates it when it is missing.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
NPROC ?= 2
# Processes that run tests.
TEST_JOBS ?= 2
# Overrides of the quickstart's config: make train ARGS="train.steps=500 run.name=short"
ARGS ?=
SITE ?= site

QUICKSTART := configs/custom_dit/quickstart.yaml

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint $(CONSTRAINTS)
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: help venv train test slow nightly lint bench docs
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# Targets: /make targets: /p' Makefile

venv: $(STAMP)

$(STAMP): $(PROJECTS) $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "mm_core needs Python 3.11 to 3.13, and this is " + sys.version.split()[0] + "; choose another: make PYTHON=python3.12")'
	@echo "installing mm-core and its plugins into $(VENV) (some minutes where torch must be downloaded)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]' $(patsubst %,--editable ./%,$(wildcard plugins/*))
	@touch $@

data/shapes/data.json: | $(STAMP)
	$(BIN)/python examples/shapes/render.py --out data/shapes

train: $(STAMP) data/shapes/data.json
	$(BIN)/mm-train --config $(QUICKSTART) --nproc $(NPROC) $(ARGS)
	$(BIN)/python examples/shapes/report.py --config $(QUICKSTART) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_JOBS) --dist loadfile

slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not nightly" -n $(TEST_JOBS) --dist loadfile

nightly: $(STAMP)
	$(BIN)/python -m pytest -m nightly --durations=0

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)
	short=0; for script in benchmarks/*.py; do $(BIN)/python $$script || short=1; done; exit $$short

docs: $(DOCS_STAMP)
	$(BIN)/python docs/generate_hooks.py --check
	$(BIN)/python docs/generate_architecture.py --check
	$(BIN)/python docs/generate_code.py --check
	$(BIN)/python docs/generate_flow.py --check
	$(BIN)/python docs/generate_api.py --check
	$(BIN)/mkdocs build --strict --site-dir $(abspath $(SITE))

$(DOCS_STAMP): $(STAMP)
	$(PIP) --editable '.[docs]'
	@touch $@
