# Every target sets up what it needs. `make help` lists them; `make PYTHON=python3.12 demo` chooses the interpreter.
PYTHON ?= python3
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# OpenMP's threads spin briefly while they wait, as in mmlab's own processes (docs/decisions/0038-threads-spin-briefly.md).
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 10000
# Tests start hundreds of processes: what Python has compiled is kept for the next one.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help demo lab test check notebooks docs site film browser strip zh bench gpu lock clean

# The stamp carries a checksum of the two files that decide what is installed, and is written last: a change of either
# installs again, and a set-up that broke off half-way is never taken for a finished one.
BIN := .venv/bin
READY := .venv/.ready-$(shell cat pyproject.toml constraints.txt | cksum | cut -d' ' -f1)

help:  ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /  \1\t/' | expand -t 14

demo: $(READY) runs/scenes/captions.json  ## compare five batch schedulers at equal memory on 800 generated scenes
	$(BIN)/mmlab compare --data runs/scenes --schedulers random,sorted,bucket,budget,fastest --image aspect:80 --epochs 2 --out runs/demo

runs/scenes/captions.json: | $(READY)
	$(BIN)/mmlab data make runs/scenes --num-images 800 --max-side 256

lab: $(READY)  ## open JupyterLab at the first notebook
	$(BIN)/jupyter lab $(if $(filter 0,$(shell id -u)),--allow-root )notebooks/00_start_here.ipynb

# First what needs one core each, with the tests' modules compiled once (three processes would each do it again). Many
# tests and notebooks wait for processes, so three share them on two cores (see tests/conftest.py). What measures time,
# or fills the machine itself, runs alone at the end.
test: style  ## everything that CI runs: lint, format, types, the site, unit tests, doctests, browser, notebooks
	@$(MAKE) --no-print-directory -j4 types site chromium compiled
	$(BIN)/python -m pytest -p no:nbval -n 3 --dist loadfile --durations=25 -m "not serial"
	@$(MAKE) --no-print-directory notebooks
	$(BIN)/python -m pytest -p no:nbval --durations=5 -m serial $$(grep -lr --include='test_*.py' mark.serial tests)

.PHONY: compiled
compiled: $(READY)
	@$(BIN)/python -m pytest -p no:nbval --collect-only -qq > /dev/null || true  # an error shows in the tests

check: lint  ## the inner loop: lint, format, types, layers, documents, and the tests of schedule, data and runs
	$(BIN)/python -m pytest -p no:nbval -n 2 --dist loadfile -m "not serial" tests/project tests/schedule tests/data tests/runs

.PHONY: lint style types
lint: style types

style: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(READY)
	$(BIN)/mypy

notebooks: $(READY)  ## execute every notebook, shrunk, and compare the outputs that are kept
	MMLAB_SMOKE=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.kernels -n 3 --dist loadfile -W default --timeout 0 \
		--nbval-lax --nbval-current-env --nbval-cell-timeout=300 notebooks/*.ipynb

docs: $(READY)  ## execute every notebook in full (ten minutes), keep the copies in docs/notebooks, and build the site
	$(BIN)/python docs/site/execute_notebooks.py notebooks/*.ipynb
	@$(MAKE) --no-print-directory site

site: $(READY)  ## build the site into build/site from the pages and the executed copies; a broken link fails
	$(BIN)/python docs/site/build_site.py build/site

film: $(READY) chromium runs/scenes/captions.json  ## film the live panel for the front page (on a quiet machine)
	$(BIN)/python docs/site/film_panel.py runs/scenes

browser: $(READY) chromium  ## drive the live panel in a real JupyterLab
	$(BIN)/python -m pytest -p no:nbval tests/browser

.PHONY: chromium
chromium: $(READY)  ## get the browser that the tests drive, where there is none
	@command -v chromium chromium-browser google-chrome chrome "$${MMLAB_CHROMIUM:-}" >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update && \
		apt-get install --yes --no-install-recommends chromium; } || $(BIN)/playwright install chromium || { \
		echo "The browser tests need Chromium: install it (apt-get install chromium), or name one in MMLAB_CHROMIUM." >&2; exit 1; }

strip: $(READY)  ## strip the notebooks for committing
	$(BIN)/python tests/project/strip_notebooks.py notebooks/*.ipynb

zh: $(READY)  ## write the Chinese notebooks from notebooks/zh/*.md and the English code cells
	$(BIN)/python tests/project/translate_notebooks.py

bench: demo  ## run the demo and the benchmarks that need no GPU, and rewrite their result files
	cp runs/demo/comparison.json benchmarks/results/demo.json
	cp runs/demo/figure.png docs/images/comparison.png
	for script in $(filter-out benchmarks/gpu.py benchmarks/list_results.py,$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python $$script --out benchmarks/results; done
	$(BIN)/python benchmarks/list_results.py

gpu:  ## measure on a CUDA machine with its own Python packages (no .venv is made)
	PYTHONPATH=. $(PYTHON) benchmarks/gpu.py --out benchmarks/results
	PYTHONPATH=. $(PYTHON) benchmarks/memory.py --device cuda --quick --out benchmarks/results

lock: $(READY)  ## pin every dependency again in constraints.txt (LOCK=--upgrade takes the newest)
	$(BIN)/uv pip compile pyproject.toml --all-extras --universal --python-version 3.11 \
		--no-emit-index-url --no-annotate --no-header --quiet $(LOCK) --output-file constraints.txt

clean:  ## remove caches and build products; .venv and runs/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -prune -exec rm -rf {} +

$(READY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "mmlab needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
		echo "Name another one: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up .venv: once, some minutes and a few GB (torch)."
	@rm -f .venv/.ready-*
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear .venv || { \
		echo "'$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test,dev,docs]'
	$(BIN)/python -m pip check --disable-pip-version-check
	@touch $@
