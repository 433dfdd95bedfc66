SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Everything a fresh machine needs: `make demo` shows what batchfit does, `make test` proves it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# What `make demo` needs: batchfit as `pip install batchfit` brings it, without the frameworks of the tests.
BASE   := $(VENV)/.base
# torchtune needs another torchao than PEFT: an environment that has the packages of .venv, and its own first.
TUNE   := .venv-torchtune
TUNED  := $(TUNE)/.ready
# A private pip cache or index is the machine's business; the versions are ours.
PIP    := $(BIN)/python -m pip --disable-pip-version-check
# Files of tests at a time, one more than there are cores (some wait for processes of their own); the tests of
# a file stay in one process, in order.
CORES  := $(shell getconf _NPROCESSORS_ONLN)
JOBS   ?= $(shell echo $$(($(CORES) < 7 ? $(CORES) + 1 : 8)))
ALONE  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --ignore=tests/integrations/torchtune
PYTEST  = $(ALONE) -n $(JOBS) --dist loadfile --no-loadscope-reorder
# What no test may be skipped for in .venv; in .venv-torchtune that is torchtune.
export BATCHFIT_REQUIRE ?= transformers,accelerate,lightning,ray,peft,bitsandbytes,torchao,trl,diffusers,sentence_transformers,gloo,matplotlib,hatchling
TUNED_PYTEST := BATCHFIT_REQUIRE=torchtune OMP_NUM_THREADS=1 $(TUNE)/bin/python -m pytest -q \
	--hypothesis-profile=same tests/integrations/torchtune
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all test-pure test-torch test-torchtune test-versions test-wheel release-check check bench soak plan-page gpu clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# pip's own remarks about this machine's package folders are noise; its errors are not.
QUIET  := 2>&1 | { grep -Ev '^WARNING: (Location|.* does not provide the extra)' || true; }

$(BASE): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing batchfit and torch into $(VENV) (half a minute, once)"
	@# torch first and on its own: an unconstrained resolve would pull gigabytes of CUDA packages
	@$(PIP) install --quiet --no-warn-conflicts -c constraints.txt torch $(QUIET)
	@$(PIP) install --quiet -c constraints.txt -e . $(QUIET)
	@$(BIN)/python -c 'import batchfit, torch'
	@touch $@

$(STAMP): $(BASE)
	@echo "installing the test dependencies into $(VENV) (a minute or two, once)"
	@$(PIP) install --quiet -c constraints.txt -e '.[test,stack]' $(QUIET)
	@$(BIN)/python -c 'import pytest, hypothesis, transformers'
	@touch $@

$(TUNED): $(STAMP) constraints-torchtune.txt
	@echo "installing torchtune into $(TUNE) (half a minute, once)"
	@$(BIN)/python -m venv --clear --without-pip $(TUNE)
	@# addsitedir reads the .pth files of .venv too: batchfit itself, and its pip, which counts what is there
	@$(TUNE)/bin/python -c "import sysconfig; place = sysconfig.get_path('purelib'); \
		shared = place.replace('$(TUNE)', '$(VENV)'); \
		open(place + '/shared.pth', 'w').write(f'import site; site.addsitedir({shared!r})')"
	@$(TUNE)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints-torchtune.txt \
		torchtune torchao $(QUIET)
	@$(TUNE)/bin/python -c 'import torchtune, batchfit'
	@touch $@

demo: $(BASE)  ## find the largest batch of a small GPT, time it, predict it for other GPUs, report
	@$(BIN)/batchfit demo

check: $(STAMP)  ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks examples docs
	$(BIN)/ruff format --check src tests benchmarks examples docs/hooks.py docs/generated
	$(BIN)/mypy

test-pure: $(STAMP)  ## the tests of pure code, with torch blocked
	BATCHFIT_BLOCK_TORCH=1 $(PYTEST) --hypothesis-profile=same $(QUICK) tests/*/pure

# `make test` leaves out what is marked slow; the pure part of `make test-all` does not.
QUICK = -m 'not slow'
test-all: QUICK =

# Of all files many wait, and two more than there are cores are soon started beside minutes of tests.
test-torch test-all: JOBS = $(shell echo $$(($(CORES) < 7 ? $(CORES) + 2 : 8)))

test-torch: $(STAMP)  ## the other tests
	$(PYTEST) --hypothesis-profile=same $(QUICK) --ignore-glob='*/pure' tests

test-torchtune: $(TUNED)  ## the tests of torchtune's recipes, in an environment of their own
	$(TUNED_PYTEST) $(QUICK)

test-integrations: test-torchtune

test-%: $(STAMP)  ## the tests in tests/%, with few Hypothesis examples: make test-find
	@test -d tests/$* || { echo "there is no folder tests/$*" >&2; exit 2; }
	@# seconds in one process: starting several would take longer
	@test ! -d tests/$*/pure || BATCHFIT_BLOCK_TORCH=1 $(ALONE) --hypothesis-profile=quick $(QUICK) tests/$*/pure
	@test -z "$$(find tests/$* -name 'test_*.py' -not -path '*/pure/*')" || \
		$(PYTEST) --hypothesis-profile=quick $(QUICK) --ignore-glob='*/pure' tests/$*

test: $(STAMP)  ## everything that must pass before a change lands (about 9 minutes on two cores)
	@# mypy has one process: the tests of pure code run beside it
	$(MAKE) --no-print-directory -j 2 check test-pure
	$(MAKE) --no-print-directory test-torch
	$(MAKE) --no-print-directory test-torchtune

test-wheel: $(STAMP)  ## the wheel in new environments, with no extra and with all of them (15 minutes)
	$(BIN)/python tests/environments.py

release-check: $(STAMP)  ## sdist and wheel in new environments, the README's commands there, twine; publishes nothing
	$(BIN)/python tests/release_check.py

test-versions: $(STAMP)  ## every torch from 2.6 to the newest, one environment after another (hours); TORCH=2.15 for one
	$(BIN)/python tests/versions.py run $(if $(TORCH),--torch $(TORCH))

test-all: check test-pure test-wheel $(STAMP) $(TUNED)  ## the long checks too
	$(PYTEST) --ignore-glob='*/pure' tests
	$(TUNED_PYTEST)

docs: $(STAMP)  ## this documentation as a site, in site/ (open site/index.html)
	@$(PIP) install --quiet -c constraints.txt -e '.[docs]' $(QUIET)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: $(STAMP)  ## benchmarks that a CPU can run, beside stored figures (under 10 minutes)
	@$(PIP) install --quiet -c constraints.txt -e '.[bench]' $(QUIET)
	@# to be kept, results go to benchmarks/results: python benchmarks/search_simulated.py
	$(BIN)/python benchmarks/search_simulated.py --output build/bench
	$(BIN)/python benchmarks/summary.py check
	$(BIN)/python benchmarks/guard.py run

plan-page: $(STAMP)  ## docs/reference/plan-table.md: models by settings by GPUs (half an hour; goes on where it was)
	$(BIN)/python -W ignore benchmarks/plan_table.py run
	$(BIN)/python benchmarks/plan_table.py page

soak: $(STAMP)  ## 10,000 steps of random small programs: nothing may stay behind (some minutes)
	$(BIN)/python benchmarks/soak.py run --out soak.json

gpu:  ## the GPU tests, on a machine with one and with its own torch
	PYTHONPATH=src:.gpu-deps BATCHFIT_REQUIRE=gpu $(PYTHON) -m pytest -q -m gpu tests/*/gpu tests/integrations/*/gpu

clean:
	rm -rf $(VENV) $(TUNE) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
