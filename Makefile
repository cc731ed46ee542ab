# `make demo` and `make test` set up .venv by themselves; they need Python 3.11 or newer, make and git.
# Another interpreter: `make test PYTHON=/path/to/python3.12`. One test: `make test ARGS="tests/test_ranks.py -k dead"`.

PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# torch is named in the same command as everything else: a second command could replace the pinned CPU build by another one.
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0 -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-thorough test-frameworks lint bench bench-s3 bench-deepspeed clean

help:
	@echo "make demo   a checkpoint moves between layouts, on your screen"
	@echo "make test   all tests"
	@echo "make test-thorough  slow tests as well, every combination of layouts, longer fuzzing"
	@echo "make test-frameworks  with the real megatron-core and transformers, which it installs in .venv; minutes"
	@echo "make lint   ruff, mypy --strict, import-linter"
	@echo "make bench  all benchmarks; results in benchmarks/results/"
	@echo "make bench-s3  object stores: beside stock DCP over s3fs, on a local SeaweedFS"
	@echo "make bench-deepspeed  beside DeepSpeed's converter; installs DeepSpeed in benchmarks/.venv-deepspeed"
	@echo "make clean  remove .venv, caches and results"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer was not found; say make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is older than Python 3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.stamp-test: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[test]"
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e ".[test,dev]"
	@touch $(VENV)/.stamp-test $@

demo: $(VENV)/.stamp-test
	$(BIN)/python examples/zero_to_mesh/demo.py $(ARGS)
	$(BIN)/python examples/fsdp/run.py --short

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(ARGS)  # two workers; each takes the next test when it is free

test-thorough: $(VENV)/.stamp-test
	$(BIN)/python -m pytest --thorough --timeout 1200 $(ARGS)

# megatron-core's wheel asks for Python 3.12 and runs on 3.11: it is unpacked, with what it imports, into a folder of its own.
MEGATRON := $(VENV)/megatron
$(VENV)/.stamp-frameworks: pyproject.toml constraints.txt | $(VENV)/.stamp-test
	$(INSTALL) -e ".[test,frameworks]"
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --python-version 3.12 --only-binary=:all: \
		megatron-core==0.19.2 -d $(MEGATRON)/wheel
	$(BIN)/python -m zipfile -e $(MEGATRON)/wheel/megatron_core-0.19.2-*.whl $(MEGATRON)/site
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(MEGATRON)/site \
		triton psutil packaging typing_extensions
	@touch $@

test-frameworks: $(VENV)/.stamp-frameworks
	UCP_DCP_MEGATRON=$(CURDIR)/$(MEGATRON)/site $(BIN)/python -m pytest -m frameworks --timeout 1500 tests/frameworks $(ARGS)

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-s3: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/bench_s3.py $(ARGS)

bench-deepspeed: $(VENV)/.stamp-test
	$(BIN)/python benchmarks/bench_deepspeed.py --install $(ARGS)

clean:
	rm -rf $(VENV) benchmarks/.venv-deepspeed build dist demo_out benchmarks/results .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
