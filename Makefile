# Two commands on a fresh machine: make demo, make test. Python 3.11 or newer and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# editors and type checkers follow an editable install of this mode alone; errors are still shown
PIP := -qq --constraint constraints.txt --config-settings editable_mode=compat

.PHONY: venv demo test test-all docs clean

# the package and what it needs to run
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "Installing Tachyscope and torch into $(VENV), once; torch is a large download."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -qq --upgrade pip
	@$(BIN)/python -m pip install $(PIP) --editable .
	@touch $@

# every extra, and the tools of the tests
$(VENV)/.dev: $(VENV)/.installed lab/pyproject.toml hardware/pyproject.toml
	@echo "Installing every extra and the tools of the tests, once."
	@$(BIN)/python -m pip install $(PIP) --editable '.[dev]' --editable lab --editable hardware
	@touch $@

venv: $(VENV)/.dev

# four lanes: the truth, the full cache, a window of 21 frames, and the plan `pose`
demo: $(VENV)/.installed
	@echo "A small world model walks through a room by three plans; this takes one to two minutes."
	@$(BIN)/python scripts/demo --out out/demo

# lint, format, types, quick tests
test: $(VENV)/.dev
	@echo "Lint, format, types and the quick tests; this takes some minutes."
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check

# and everything else that needs no GPU
test-all: test
	@echo "The slow tests; this takes about half an hour."
	@PATH="$(abspath $(BIN)):$$PATH" scripts/check --slow

# the site, with the command line's and the library's reference: out/site/index.html
$(VENV)/.docs: $(VENV)/.installed
	@echo "Installing what builds the site, once."
	@$(BIN)/python -m pip install $(PIP) --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	@$(BIN)/python scripts/write_site.py out/docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is out/site/index.html."

clean:
	rm -rf $(VENV) out build *.egg-info */*.egg-info */build .pytest_cache .mypy_cache .ruff_cache .hypothesis
