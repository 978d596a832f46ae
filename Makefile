# Everything runs in $(VENV), which make creates where it is missing. `make help` prints the lines that begin with `## `.
PYTHON ?= python3
VENV ?= .venv
CONSTRAINTS ?= constraints.txt
NPROC ?= 2
# Processes that run tests. Slow tests wait for each other's signals and timeouts: three of them keep two cores busy.
TEST_JOBS ?= 2
SLOW_JOBS ?= 3
# Overrides of the quickstart's config: make train ARGS="train.steps=500 run.name=short"
ARGS ?=
SITE ?= site
# The image's device (cuda, cpu or ascend) and name. CANN 9.1 goes with the torch_npu of the Dockerfile.
DEVICE ?= cuda
IMAGE ?= mm_core:$(DEVICE)
CANN ?= quay.io/ascend/cann:9.1.0-910b-ubuntu22.04-py3.11

QUICKSTART := configs/custom_dit/quickstart.yaml

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint $(CONSTRAINTS)
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
PAGE_SCRIPTS := $(wildcard docs/generate_*.py)
PROJECTS := pyproject.toml $(wildcard plugins/*/pyproject.toml)

.PHONY: help venv train test slow nightly cover lint format types bench pages check-pages docs changes image
.DEFAULT_GOAL := help

## help: this list
help:
	@awk '/^## [a-z-]+: / {name = $$2; sub(/:/, "", name); sub(/^## [^ ]+ /, ""); printf "make %-12s %s\n", name, $$0}' $(MAKEFILE_LIST)

## venv: create .venv with mm-core, its plugins and the versions of constraints.txt
venv: $(STAMP)

$(STAMP): $(PROJECTS) $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(None if (3, 11) <= sys.version_info < (3, 14) else "mm_core needs Python 3.11 to 3.13, and this is " + sys.version.split()[0] + "; choose another: make PYTHON=python3.12")'
	@echo "installing mm-core and its plugins into $(VENV) (some minutes where torch must be downloaded)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[dev]' $(patsubst %,--editable ./%,$(wildcard plugins/*))
	@touch $@

data/shapes/data.json: | $(STAMP)
	$(BIN)/python examples/shapes/render.py --out data/shapes

## train: train the quickstart on two ranks and judge its samples; ARGS="key=value ..." overrides its config
train: $(STAMP) data/shapes/data.json
	$(BIN)/mm-train --config $(QUICKSTART) --nproc $(NPROC) $(ARGS)
	$(BIN)/python examples/shapes/report.py --config $(QUICKSTART) $(ARGS)

## test: the fast tests
test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(TEST_JOBS) --dist loadfile

## slow: the tests that take more than ten seconds or start processes
slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow and not nightly" -n $(SLOW_JOBS) --dist loadfile --durations=15 \
	  -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true

## nightly: every test with the oldest and the newest torch, and the benchmarks, in environments built from nothing
nightly:
	.ci/nightly

## cover: the fast tests, and how much of mm_core and the plugins they run
cover: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" --cov=mm_core --cov=plugins --cov-report=term:skip-covered

## lint: ruff, mypy --strict and the import contracts
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/repo/test_words.py

## format: fix what ruff can fix, then format
format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## types: mypy --strict alone
types: $(STAMP)
	$(BIN)/mypy

## bench: every benchmark, each against its bar
bench: $(STAMP)
	short=0; for script in benchmarks/*.py; do $(BIN)/python $$script || short=1; done; exit $$short

## pages: write the pages, code blocks and drawings that scripts in docs/ make
pages: $(STAMP)
	for script in $(PAGE_SCRIPTS); do $(BIN)/python $$script || exit 1; done

## check-pages: check that they are what the scripts would write
check-pages: $(STAMP)
	for script in $(PAGE_SCRIPTS); do $(BIN)/python $$script --check || exit 1; done

## docs: check the generated pages and build the site into site/, strictly
# Not --quiet: mkdocs would then count no warning, and --strict would pass.
docs: $(DOCS_STAMP) check-pages
	$(BIN)/mkdocs build --strict --site-dir $(abspath $(SITE))

## changes: the changelog that the fragments in changes/ make, as a draft
changes: $(STAMP)
	$(BIN)/towncrier build --draft --version "$$($(BIN)/python -c 'import mm_core; print(mm_core.__version__)')"

## image: a container image by docker; DEVICE=cpu or DEVICE=ascend for other devices than CUDA's, IMAGE=name
image:
	docker build --build-arg DEVICE=$(DEVICE) $(if $(filter ascend,$(DEVICE)),--build-arg BASE=$(CANN)) \
	  --tag $(IMAGE) .

$(DOCS_STAMP): $(STAMP)
	$(PIP) --editable '.[docs]'
	@touch $@
