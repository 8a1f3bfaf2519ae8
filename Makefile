# `make` lists the targets. With PY=/path/to/python they use that interpreter as it is and create nothing.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
ifeq ($(origin PY),undefined)
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
endif

# The links in aotc/ make a checkout importable without an installation, for a PY that has only the dependencies.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

INSTALL = -m pip install --quiet --disable-pip-version-check -c requirements/lock.txt -e '.[all,dev]'
PYTEST = $(PY) -m pytest -q
AOTC = $(PY) -m aotc
MODEL ?= $$($(PY) -m benchmarks.fetch_model)
PROMPT ?= What is the capital of France?
ROUNDS ?= 20
MINUTES ?= 20

.PHONY: help setup demo test gpu lint types golden bench soak size clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## create .venv with everything that building and testing needs

$(VENV)/.ready: pyproject.toml requirements/lock.txt
	$(PYTHON) -m venv $(VENV)
	$(PY) $(INSTALL)
	@touch $@

demo: build/smollm2 ## compile a small real model for this CPU and ask it a question
	$(AOTC) run build/smollm2 --prompt "$(PROMPT)"

build/smollm2: $(READY) $(shell find aotc codegen models passes runtime -type f -not -name '*.pyc')
	rm -rf $@
	model=$(MODEL); $(AOTC) compile "$$model" --arch cpu -o $@
	@touch $@

test: $(READY) ## run the tests, on two workers
	$(PYTEST) -n 2

gpu: $(READY) ## run the tests that need a CUDA device
	$(PYTEST) -m gpu

lint: $(READY) ## ruff, and import-linter for the direction of dependencies
	$(PY) -m ruff check --output-format=concise .
	$(PY) -c 'from importlinter.cli import lint_imports_command as main; main()'

types: $(READY) ## pyright
	$(PY) -m pyright --pythonpath "$$(command -v $(PY))"

golden: $(READY) ## rewrite the golden files; review the difference before committing it
	$(PYTEST) --update-golden tests/codegen/test_golden_cuda.py tests/frontend/test_onnx_backend.py tests/frontend/test_tokenizer_gguf.py
	git status --short tests

bench: build/smollm2 ## measure the demo's model
	$(AOTC) bench startup build/smollm2
	$(AOTC) bench latency build/smollm2

soak: $(READY) ## a server under load for MINUTES, long random runs of the engine, property tests on ROUNDS fresh seeds
	$(PY) -m benchmarks.soak_server --minutes $(MINUTES)
	AOTC_SOAK_STEPS=100000 $(PYTEST) -n 2 tests/runtime/test_kv_model.py tests/runtime/test_engine_model.py
	for seed in $$(seq $(ROUNDS)); do \
	  $(PYTEST) -n 2 -m 'hypothesis and not gpu' --hypothesis-profile=soak --hypothesis-seed=$$seed; done

size: ## install only what running artifacts needs, in a scratch folder, and print the size
	scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; \
	$(PYTHON) -m venv "$$scratch/venv"; before=$$(du -sm "$$scratch/venv" | cut -f1); \
	"$$scratch/venv/bin/python" -m pip install --quiet --disable-pip-version-check -c requirements/lock.txt .; \
	after=$$(du -sm "$$scratch/venv" | cut -f1); \
	echo "aotc and its dependencies: $$((after - before)) MB (goal: 150)"; \
	test $$((after - before)) -le 150

clean: ## remove what the targets above built, .venv included
	rm -rf .venv build dist *.egg-info
