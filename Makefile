PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt

.PHONY: demo test check lint bench-build .venv

demo: .venv
	$(BIN)/python demo.py

test: lint check
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: .venv
	$(BIN)/kvgen build --check specs/*.yaml

lint: .venv
	$(BIN)/ruff check kvgen tests bench generated demo.py
	$(BIN)/ruff format --check kvgen tests bench generated demo.py

bench-build: .venv
	$(BIN)/python bench/build.py

.venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools wheel
	$(PIP) torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.9.0  # torch for CPUs brings none; torch for CUDA its own
	$(PIP) --no-build-isolation --editable '.[pool,dev]'
	touch $@
