# `make serve` and `make test` set up everything by themselves: a .venv with the exact versions of requirements.lock.
# The recipes use pip, not uv: the lock's torch is a CPU build where pip finds one, PyPI's elsewhere.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: serve test check bench clean

serve: $(STAMP)
	$(BIN)/python -m dlmserve $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(STAMP)
	$(BIN)/python -m bench.kernels
	$(BIN)/python -m bench.engine

$(STAMP): requirements.lock pyproject.toml setup.py $(wildcard dlmserve/*/csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info dlmserve/*/*.so
