# Both commands set everything up by themselves on a fresh machine.
PYTHON ?= python3
VENV   := .venv
RUN    := $(VENV)/bin
READY  := $(VENV)/.ready

export KERAS_BACKEND := torch

.PHONY: demo test lint format clean

demo: $(READY)
	OMP_NUM_THREADS=1 $(RUN)/torchrun --nproc-per-node 2 examples/demo.py

test: lint
	$(RUN)/python -m pytest

lint: $(READY)
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy

format: $(READY)
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .

# The constraints pin torch to a CPU build that is small to install.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet --constraint constraints.txt --editable ".[test]"
	touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .mypy_cache
