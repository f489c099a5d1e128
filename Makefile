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

# every extra, and the tools of the tests
$(VENV)/.dev: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

venv: $(VENV)/.dev

demo: $(VENV)/.installed
	$(BIN)/tachyscope compare atrium-world --world 3 --plan fast --frames 72 \
		--actions "q*24 w*4 s*4 e*24 q*16" --out out/demo

# lint, format, types, quick tests
test: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

# and everything else that needs no GPU
test-all: test
	PATH="$(abspath $(BIN)):$$PATH" scripts/check --slow

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
