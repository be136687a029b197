# Targets: setup pretrain test lint device-compile clean.  All but clean do the set-up themselves.
#
#   make pretrain               tokenize a small text, train the tiny model, evaluate, save, resume, sample
#   make pretrain RESUME=1      continue the last run instead of starting a new run folder
#   make test ARGS="-k muon"    extra arguments for pytest (for pretrain: for the training script)
#   make test QUICK=1           the part of the tests that tests/quick.txt lists, in minutes
#   make device-compile         compile the CUDA sources, link nothing: needs nvcc and no GPU
#   make setup PYTHON=python3.12 TORCH=torch==2.13.0 TORCH_INDEX=https://...
#                               another interpreter, torch requirement, package index for torch

export PYTHON TORCH TORCH_INDEX RESUME ARGS
VENV_PYTHON := .venv/bin/python
# A process of pytest per core, each with whole files, so that what a file's tests share is made once.
PYTEST := $(VENV_PYTHON) -m pytest -n auto --maxprocesses 4 --dist loadfile

.PHONY: setup pretrain test lint device-compile clean

setup:
	@bash tools/setup_environment.sh

pretrain: setup
	@$(VENV_PYTHON) tools/pretrain_default.py

test: setup
	@start=$$(date +%s); $(PYTEST) $(if $(QUICK),--quick) $(ARGS); status=$$?; \
	    seconds=$$(($$(date +%s) - start)); \
	    echo "tests: $$((seconds / 60)) min $$((seconds % 60)) s"; exit $$status

lint: setup
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .

device-compile: setup
	@$(VENV_PYTHON) csrc/build.py device-compile

# Build leftovers and caches, native libraries included. The environment (.venv) and the runs stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache megamuon/_native
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
