# `make run` and `make test` set up everything they need. `make help` lists the targets.
SHELL := /bin/bash
PYTHON ?= python3
UV := $(shell command -v uv 2>/dev/null || echo .uv/bin/uv)
BIN := .venv/bin
ARGS ?=
export OMP_NUM_THREADS ?= 1

.PHONY: help setup run test lint generate check-generated compiled lock bench-loop bench-rollout bench-queue clean \
	images cluster-up cluster-down test-cluster

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: .venv/.ready  ## make the environment (.venv) from requirements.lock

.uv/bin/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'tandem: needs Python 3.11 or newer; set PYTHON=/path/to/python3.11' >&2; exit 64; }
	@$(PYTHON) -m venv .uv || { echo 'tandem: python3 -m venv failed; install it (Debian: apt-get install python3-venv), or install uv' >&2; exit 64; }
	@.uv/bin/pip install --quiet --disable-pip-version-check uv==0.13.9

.venv/.ready: requirements.lock pyproject.toml | $(filter .uv/bin/uv,$(UV))
	@echo 'tandem: making .venv (about 6 GB: torch brings its CUDA libraries); this takes about a minute'
	@test -x $(BIN)/python || $(UV) venv --quiet --python '>=3.11' .venv
	@$(UV) pip sync --quiet --python $(BIN)/python --require-hashes requirements.lock
	@$(UV) pip install --quiet --python $(BIN)/python --no-deps --editable .
	@touch $@

run: .venv/.ready  ## the main job: post-train the tiny MoE (ARGS="…" go to `tandem run`)
	@$(BIN)/tandem run configs/runs/quickstart.yaml $(ARGS)

test: .venv/.ready  ## all tests that need no cluster (ARGS="…" go to pytest)
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

cluster-up: .venv/.ready  ## start a real single-node Kubernetes here (root; the first time builds it: 20 minutes)
	@$(BIN)/python -m tests.cluster.cluster up $(ARGS)

cluster-down: .venv/.ready  ## stop it (ARGS=--wipe forgets its state too)
	@$(BIN)/python -m tests.cluster.cluster down $(ARGS)

test-cluster: .venv/.ready  ## the tests that need that cluster, started if it is not up (ARGS="--json FILE" writes figures)
	@$(BIN)/python -m tests.cluster.cluster up --images
	@$(BIN)/python -m pytest tests/cluster -v $(ARGS)

lint: .venv/.ready  ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

generate: .venv/.ready  ## write again what is generated: compiled pipelines, schemas, component READMEs
	$(BIN)/python -m pipelines.compile
	$(BIN)/python -m configs.schema
	$(BIN)/python -m components.readme

compiled: .venv/.ready  ## write the compiled pipelines again
	$(BIN)/python -m pipelines.compile

check-generated: generate  ## fail if something generated is stale
	git diff --exit-code -- pipelines/compiled configs/schemas 'components/*/README.md'

lock: .venv/.ready .uv/bin/uv  ## resolve what pyproject.toml asks for, keeping versions (ARGS=--upgrade moves them)
	.uv/bin/uv pip compile --quiet pyproject.toml --extra torch --extra kfp --extra dev --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-annotate --no-header $(ARGS) --output-file requirements.lock
	$(BIN)/python -m images.locks

images: .venv/.ready  ## build the container images for CPUs (root; docs/images.md; ARGS="--push PREFIX" pushes them)
	@$(BIN)/python -m images.build --stack cpu --bootstrap-base $(ARGS)

bench-loop bench-rollout bench-queue: bench-%: .venv/.ready  ## measure (ARGS="…" go to `tandem bench`)
	@$(BIN)/tandem bench $* $(ARGS)

clean:  ## remove the environment (runs stay)
	rm -rf .venv .uv .mypy_cache .ruff_cache .hypothesis
