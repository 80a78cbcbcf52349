# Everything a fresh machine needs beyond Python, a Rust toolchain and make is installed here, into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The engine environment is 6.4 GB and outlives checkouts; tests/engine/environment.py says where it lies.
ENGINE_PYTEST ?= tests/engine tests/conformance
# Started when the other engines have ended: beside all of them it would need more than 24 GB.
ENGINE_ALONE := tests/engine/test_ranks.py

SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust -name '*.rs' -o -name Cargo.toml | grep -v target)

.PHONY: help dev test loom verify-reuse lint format soak bench wheel engine-env engine-test run run-engines clean
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  \033[1m%-12s\033[0m %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.10 or later is needed: set PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --group dev
	@touch $@

$(VENV)/.built: $(STAMP) $(SOURCES)
	PIP_QUIET=1 $(BIN)/maturin develop --release --quiet
	@touch $@

dev: $(VENV)/.built ## virtual environment with kvroute built into it

test: dev ## all tests but those on real engines
	cargo test --release --quiet --workspace --exclude kvroute-python
	$(BIN)/python -m pytest tests

loom: ## the gate's atomics, in every order that threads can run
	RUSTFLAGS="--cfg loom" cargo test --release --quiet --package kvroute-core --lib --target-dir target/loom interleavings

soak: dev ## ten minutes of conversations on simulated engines that fail at random
	KVROUTE_SOAK_SECONDS=600 $(BIN)/python -m pytest tests/soak -s

verify-reuse: dev ## every text of 20,000 changing turns each way on simulated engines, 320 on real ones
	$(BIN)/python -m tests.reuse --real-turns 160

lint: dev ## ruff, mypy, clippy, rustfmt
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	cargo fmt --all --check
	cargo clippy --release --all-targets --quiet -- -D warnings

format: $(STAMP) ## format Python and Rust
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/ruff format
	cargo fmt --all

bench: dev ## micro-benchmarks, printed as tables
	$(BIN)/python -m pytest bench --benchmark-enable --benchmark-group-by=group --benchmark-columns=min,median,stddev,ops

wheel: $(STAMP) ## the wheel, in dist/
	$(BIN)/maturin build --release --quiet --out dist

engine-env: $(STAMP) ## build or reuse the environment of the real engines (6.4 GB)
	$(BIN)/python -m tests.engine.environment

engine-test: dev ## tests on a real vLLM prefill/decode pair
	KVROUTE_ENGINE=1 $(BIN)/python -m pytest $(ENGINE_PYTEST) -m engine -s --ignore=$(ENGINE_ALONE)
	$(if $(filter file,$(origin ENGINE_PYTEST)),KVROUTE_ENGINE=1 $(BIN)/python -m pytest $(ENGINE_ALONE) -m engine -s)

run: dev ## the gateway on simulated engines: a report of what it does, then it stays up for curl (PORT=8010 for another port)
	$(BIN)/kvroute demo $(if $(PORT),--port $(PORT))

run-engines: dev ## the gateway on a real vLLM prefill/decode pair, and curl commands to try
	$(BIN)/python -m tests.engine.run

clean: ## remove what was built (not the engine environment)
	rm -rf $(VENV) target dist build .mypy_cache .ruff_cache .pytest_cache
