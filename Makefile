# Every target is complete from a fresh clone: `venv` finds or gets Python 3.12 and installs the locked requirements.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/sh

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
PACKAGES := kv_common kv_control kv_execution maxtext_paged
MODEL := .cache/models/smollm2-135m

# The bare run is CPU-only, offline, and leaves its compiled programs where the next run finds them.
export DECOUPLE_GCLOUD := TRUE
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS := 0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES := -1

help:  ## what there is
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(MAKEFILE_LIST)

venv:  ## .venv with the locked requirements and this project (seconds when nothing changed)
	@PYTHON='$(PYTHON)' sh scripts/make-venv

demo: venv  ## ten prompts through SmolLM2-135M on a paged KV pool inside MaxText
	@mkdir -p out
	@$(BIN)/python -c "from maxtext_paged.convert import converted_smollm2; print(converted_smollm2('$(dir $(MODEL))'))"
	JAX_PLATFORMS=cpu $(BIN)/maxtext-paged generate $(MODEL)/config.yml -i examples/prompts.jsonl -o out/demo.jsonl --overwrite
	@$(BIN)/python scripts/show-completions.py examples/prompts.jsonl out/demo.jsonl

test: SLOW := --slow
test: test-quick  ## all tests that need no GPU: on eight virtual devices, then on one

test-quick: venv  ## those that are not marked slow: minutes
	@rc=0; \
	XLA_FLAGS="$$XLA_FLAGS --xla_force_host_platform_device_count=8" $(PYTEST) -m multi_device -n 2 --dist loadfile $(SLOW) $(PYTEST_ARGS) || rc=$$?; \
	$(PYTEST) -n 2 --dist loadfile $(SLOW) $(PYTEST_ARGS) || rc=$$?; \
	exit $$rc

test-long: venv  ## random traffic of 100,000 calls, every family on every backend, real models: an hour and more
	@rc=0; \
	XLA_FLAGS="$$XLA_FLAGS --xla_force_host_platform_device_count=8" $(PYTEST) -m "long and multi_device" $(PYTEST_ARGS) || rc=$$?; \
	$(PYTEST) -m long $(PYTEST_ARGS) || rc=$$?; \
	exit $$rc

test-gpu: venv  ## the tests that need a GPU, on a machine that has one
	@$(BIN)/python -c "import jax; print('GPU:', jax.devices('gpu')[0].device_kind)"
	$(PYTEST) -m gpu $(PYTEST_ARGS)

lint: venv  ## formatting and lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

contracts: venv  ## who may import whom
	$(BIN)/lint-imports

types: venv  ## strict where the house is ours alone, looser beside untyped upstreams
	$(BIN)/mypy --strict kv_common kv_control
	$(BIN)/mypy kv_execution maxtext_paged

doctest: venv  ## the examples in docstrings
	JAX_PLATFORMS=cpu $(PYTEST) -q --doctest-modules --ignore=kv_execution/attention/triton_kernels kv_common kv_control kv_execution

docs: venv  ## the documentation's site in site/, warnings as errors (reads sources, imports none of them)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

check-fast: lint contracts types doctest docs  ## all of `check` but the tests

check: check-fast test-quick  ## is it good? one answer in five minutes; CI runs `test` in place of `test-quick`

format: venv  ## rewrite the files the way `lint` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: venv  ## rewrite requirements/cpu.txt from pyproject.toml (keeps locked versions that still fit)
	sh scripts/lock

clean:  ## caches and outputs; keeps .venv and the converted model
	rm -rf .cache/jax .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist out site

.PHONY: help venv demo test test-quick test-long test-gpu lint contracts types doctest docs check-fast check format lock clean
