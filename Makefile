# Targets: setup pretrain test lint device-compile clean.  All but clean do the set-up themselves.
#
#   make pretrain               tokenize a small text, train the tiny model, evaluate, save, resume, sample
#   make pretrain RESUME=1      continue the last run instead of starting a new run folder
#   make test ARGS="-k muon"    extra arguments for pytest (for pretrain: for the training script)
#   make device-compile         compile the CUDA sources, link nothing: needs nvcc and no GPU
#   make setup PYTHON=python3.12 TORCH=torch==2.13.0 TORCH_INDEX=https://...
#                               another interpreter, torch requirement, package index for torch

export PYTHON TORCH TORCH_INDEX RESUME ARGS
VENV_PYTHON := .venv/bin/python

.PHONY: setup pretrain test lint device-compile clean

setup:
	@bash tools/setup_environment.sh

pretrain: setup
	@$(VENV_PYTHON) tools/pretrain_default.py

test: setup
	@$(VENV_PYTHON) -m pytest $(ARGS)

lint: setup
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .

device-compile: setup
	@$(VENV_PYTHON) csrc/build.py device-compile

# Build leftovers and caches, native libraries included. The environment (.venv) and the runs stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache megamuon/_native
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
