PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
PEERS_PIP := .venv-peers/bin/python -m pip --disable-pip-version-check install --quiet
OLDEST_PIP := .venv-oldest/bin/python -m pip --disable-pip-version-check install --quiet
VLLM_PIP := .venv-vllm/bin/python -m pip --disable-pip-version-check install --quiet

KERNELS := tests/test_launches.py tests/test_compiled.py tests/test_operations.py tests/test_kv_pools.py tests/test_mla.py \
	tests/test_large_numbers.py
COMPILER := $(addprefix tests/test_,$(addsuffix .py,source schema problems expressions golden emission injection adapters cli docs shipped))

.PHONY: demo test test-long test-triton test-oldest test-peers test-sglang test-vllm check lint bench-build bench-cpu bench-gpu .venv .venv-triton .venv-oldest .venv-peers .venv-vllm

demo: .venv
	$(BIN)/python demo.py

test: lint check
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-long: .venv
	$(BIN)/python -m pytest -m long

test-triton: .venv-triton
	.venv-triton/bin/python -m pytest -n 2 --dist loadfile $(KERNELS)

test-oldest: .venv-oldest
	.venv-oldest/bin/python -W error -m kvgen build --check specs/*.yaml
	.venv-oldest/bin/python -W error -m kvgen build --check --engine sglang specs/glm_dsa.yaml specs/mla.yaml specs/gqa.yaml
	.venv-oldest/bin/python -m pytest -n 2 --dist loadfile $(COMPILER)

test-peers: test-sglang test-vllm

test-sglang: .venv-peers
	.venv-peers/bin/python -m pytest --confcutdir tests/peers -W ignore tests/peers $(PEERS)

test-vllm: .venv-vllm
	.venv-vllm/bin/python -m pytest --confcutdir tests/peers_vllm -W ignore tests/peers_vllm $(PEERS)

check: .venv
	$(BIN)/kvgen build --check specs/*.yaml
	$(BIN)/kvgen build --check --engine sglang specs/glm_dsa.yaml specs/mla.yaml specs/gqa.yaml

lint: .venv
	$(BIN)/ruff check kvgen tests bench build_backend generated demo.py
	$(BIN)/ruff format --check kvgen tests bench build_backend generated demo.py

bench-build: .venv
	$(BIN)/python bench/build.py

bench-gpu:
	$(PYTHON) bench/gpu.py

bench-cpu: .venv .venv-peers
	$(BIN)/python -W ignore bench/launch.py
	MALLOC_TRIM_THRESHOLD_=68719476736 MALLOC_MMAP_THRESHOLD_=34359738368 .venv-peers/bin/python -W ignore bench/cpu.py

.venv: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) setuptools wheel
	$(PIP) torch
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP) triton==3.9.0  # torch for CPUs brings none; torch for CUDA its own
	$(PIP) --no-build-isolation --editable '.[pool,dev]'
	touch $@

.venv-triton: .venv-triton/installed

.venv-triton/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv-triton
	.venv-triton/bin/python -m pip --disable-pip-version-check install --quiet setuptools wheel torch==2.13.0 triton==3.8.0
	.venv-triton/bin/python -m pip --disable-pip-version-check install --quiet --no-build-isolation --editable '.[dev]'
	touch $@

.venv-oldest: .venv-oldest/installed

.venv-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv --clear .venv-oldest
	$(OLDEST_PIP) setuptools wheel torch==2.13.0
	.venv-oldest/bin/python -c 'import triton' 2>/dev/null || $(OLDEST_PIP) triton==3.9.0
	$(OLDEST_PIP) --constraint constraints-oldest.txt --no-build-isolation --editable '.[pool,dev]'
	touch $@

.venv-peers: .venv-peers/installed

.venv-peers/installed: tests/peers/requirements.txt pyproject.toml
	$(PYTHON) -m venv --clear .venv-peers
	$(PEERS_PIP) setuptools wheel
	$(PEERS_PIP) torch==2.13.0
	$(PEERS_PIP) -r tests/peers/requirements.txt
	$(PEERS_PIP) --no-deps sglang==0.5.23  # what it declares needs a GPU
	$(PEERS_PIP) --no-deps --no-build-isolation --editable .
	touch $@

.venv-vllm: .venv-vllm/installed

.venv-vllm/installed: tests/peers_vllm/requirements.txt
	$(PYTHON) -m venv --clear .venv-vllm
	$(VLLM_PIP) torch==2.13.0
	$(VLLM_PIP) -r tests/peers_vllm/requirements.txt
	$(VLLM_PIP) --no-deps vllm==0.33.0  # what it declares needs a GPU
	touch $@
