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

# the evaluation's own walk (docs/eval.md) lies behind, twice, and one more turn; then a look to both sides
WALK := q*24 w*2 a*2 e*20 d*4 q*20 s*4 e*20 w*2 d*2 s*2 a*2
demo: $(VENV)/.installed
	$(BIN)/tachyscope compare atrium-world --world 1000000003 --given 257 --frames 16 --no-floor \
		--actions "q*24 $(WALK) $(WALK) q*24 q*4 e*8 q*4" \
		--plan "attention=ann:k=640,tile=64,block=1" --out out/demo

# lint, format, types, quick tests
test: $(VENV)/.dev
	PATH="$(abspath $(BIN)):$$PATH" scripts/check

# and everything else that needs no GPU
test-all: test
	PATH="$(abspath $(BIN)):$$PATH" scripts/check --slow

clean:
	rm -rf $(VENV) out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
