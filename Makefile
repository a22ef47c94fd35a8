# Everything runs in .venv, which is made and filled on first use and whenever the requirements
# change. Another Python: make PYTHON=python3.12 …   (only read while .venv does not exist yet)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
READY  := $(VENV)/.ready

# A worker on each core; a file's tests stay together, for what they share is made once.
PARALLEL := --numprocesses auto --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(READY)-demo ## record a small detector in FP32, analyze it, train it in FP16 by the plan, compare
	@$(BIN)/mpdiag demo

.PHONY: test
test: $(READY)-test ## run the tests but the long ones (ARGS="-k name" goes to pytest)
	@$(BIN)/python -m pytest $(PARALLEL) -m "not long" $(ARGS)

.PHONY: test-all
test-all: $(READY)-test ## all tests, also of studies, benchmarks and other people's trainers
	@$(BIN)/python -m pytest $(PARALLEL) tests studies/tests benchmarks/tests $(ARGS)

.PHONY: docs
docs: $(READY)-docs ## build the documentation into site/
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: lint
lint: $(READY)-dev ## check style and formatting with ruff
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

.PHONY: types
types: $(READY)-dev ## check types with mypy, strict
	@$(BIN)/mypy

.PHONY: format
format: $(READY)-dev ## let ruff fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: bench
bench: $(READY)-bench ## run every benchmark; each prints ratios
	@for script in $(filter-out %/gpu.py,$(wildcard benchmarks/[a-z]*.py)); do \
		echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done

.PHONY: gpu
gpu: ## settle on a GPU what only a GPU can settle; needs no .venv (ARGS="--quick")
	@$(PYTHON) benchmarks/gpu.py $(ARGS)

.PHONY: studies
studies: $(READY)-bench ## run every study of correctness: hours
	@for script in $(filter-out %/one_by_one.py,$(wildcard studies/[a-z]*.py)); do \
		echo "== $$script"; $(BIN)/python $$script || exit 1; \
	done

.PHONY: wheel
wheel: $(READY)-dev ## build the wheel and the source archive into dist/, and check them with twine
	@rm -rf dist
	@$(BIN)/python -m build --outdir dist
	@$(BIN)/twine check --strict dist/*

.PHONY: clean
clean: ## remove builds and caches; .venv and runs/ stay
	@rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# One stamp for each extra: install it once, and again when what it is made of has changed.
# A .venv that is missing, half made or broken is made anew first.
$(READY)-%: pyproject.toml constraints.txt mpdiag/version.py
	@$(PIP) --version >/dev/null 2>&1 || { \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
			echo "mpdiag needs Python 3.10 or newer: make PYTHON=/path/to/python" >&2; exit 1; }; \
		echo "Making $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing mpdiag with its $* requirements into $(VENV) (once; the first time takes minutes)"
	@$(PIP) install -qq --constraint constraints.txt --editable ".[$*]"
	@touch $@
