# Two commands on a fresh machine: make demo, make test. Python 3.11 or newer and make are enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: venv demo test test-all clean

# the package and what it needs to run
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

# the tools and oracles of the tests
$(VENV)/.tested: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

venv: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/tachyscope compare atrium-world --world 3 --plan fast --frames 72 \
		--actions "q*24 w*4 s*4 e*24 q*16" --out out/demo

test: $(VENV)/.tested
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

test-all: $(VENV)/.tested
	PATH="$(abspath $(BIN)):$$PATH" scripts/check --all

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
