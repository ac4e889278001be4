# Every install goes through constraints.txt, torch first: an unconstrained step may pull gigabytes that nobody asked for.
# PIP_ARGS is handed to each pip install (another index, a proxy, -v to see more).

PYTHON ?= python3
PIP_ARGS ?=
PYTEST_ARGS ?=
PARALLEL ?= -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
OUT ?= out/demo
KILLS ?= 25
SEEDS ?= 2000
ROWS ?= 1000000
SEED ?=
FAULTS ?= 40
EXAMPLES ?= 200
WORKER ?= null
ATTACKS ?=
FORM ?=
HOSTILE_ARGS ?=
IMAGES ?= control worker
GPU_PYTHON ?= $(PYTHON)
GPU_ARGS ?=

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check -qq $(PIP_ARGS)
CONSTRAINT := $(abspath constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install run test test-slow test-all test-bench test-page test-memory test-servers chaos cluster cluster-faults hostile releases simulate fuzz-http infra infra-apply sbom alerts observability lint format bench gpu-bench fleet streams test-torch211 clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.run.stamp  ## make .venv and install tokenmill in it

run: $(VENV)/.run.stamp  ## run the demo: examples/requests.jsonl -> Parquet under out/demo
	@$(PY) -m tokenmill run examples/requests.jsonl --model demo --output $(OUT)
	@$(PY) examples/show_results.py $(OUT)

# Several processes of tests share the machine (many a test waits for servers, so two for each of two cores): OpenMP
# threads that wait for each other spin, and each would hold the others up.
test test-all test-slow: export OMP_NUM_THREADS ?= 1

test: $(VENV)/.dev.stamp  ## run the tests that take little: five minutes on two quiet cores
	$(PY) -m pytest $(PARALLEL) -m "not slow and not exhaustive" $(PYTEST_ARGS)

test-slow: $(VENV)/.dev.stamp  ## run the tests marked slow: real models, processes, servers, seconds of processor time each
	$(PY) -m pytest $(PARALLEL) -m "slow and not exhaustive" $(PYTEST_ARGS)

test-all: $(VENV)/.dev.stamp  ## run every test that CI runs: all but the exhaustive ones
	$(PY) -m pytest $(PARALLEL) -m "not exhaustive" $(PYTEST_ARGS)

test-torch211: $(VENV)-torch211/.stamp  ## run the engine's tests on a CPU with torch 2.11, the oldest we take, and its Triton
	OMP_NUM_THREADS=1 $(VENV)-torch211/bin/python -m pytest $(PARALLEL) -m "not slow and not exhaustive" tests/engine \
		--ignore-glob='*/test_*scheduler*' $(PYTEST_ARGS)

ASAN := $(abspath out/asan)
test-memory: export OMP_NUM_THREADS := 1
test-memory: export CXX := g++ -fsanitize=address -g -fno-omit-frame-pointer
test-memory: export TOKENMILL_NATIVE_CACHE := $(ASAN)
test-memory: $(VENV)/.dev.stamp  ## run the tests of the native kernels while AddressSanitizer watches them (needs g++ and its libasan)
	@mkdir -p $(ASAN) && rm -f $(ASAN)/report.*
	$(PY) -c "from engine.native.build import build; build()"
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:log_path=$(ASAN)/report $(PY) -m pytest $(PARALLEL) \
		-m "not slow and not exhaustive" --ignore tests/engine/native/test_native_build.py \
		$(addprefix tests/engine/,native attention cache checkpoints embedding models quant sampling speculative) \
		$(filter-out %scheduler.py %properties.py %overhead.py,$(wildcard tests/engine/scheduler/test_*.py)) \
		tests/engine/runner/test_cache_planning.py $(wildcard tests/engine/test_*.py) \
		$(PYTEST_ARGS) || { cat $(ASAN)/report.* 2>/dev/null; exit 1; }

test-servers: $(VENV)/.dev.stamp  ## the long tests on real servers: a durable S3 server, 50 rebalances of Kafka
	$(PY) -m pytest -m exhaustive tests/pipeline $(PYTEST_ARGS)

test-bench: $(VENV)/.dev.stamp  ## the long tests of benchmarks (environments of peers, a bare machine) and of the engine: every family at every setting, kernels compiled for older GPUs
	OMP_NUM_THREADS=1 $(PY) -m pytest -m exhaustive tests/benchmarks tests/engine tests/workers $(PYTEST_ARGS)

test-page: $(VENV)/.browser.stamp  ## try the page in headless Chromium, which must be installed, and make its pictures in docs/images
	$(PY) -m pytest tests/tokenmill/services/test_page.py $(PYTEST_ARGS)
	PYTHONPATH=. $(PY) docs/make_pictures.py

chaos: $(VENV)/.dev.stamp  ## kill real runs of the demo model at random moments (KILLS=n), and compare
	$(PY) -m tests.tokenmill.chaos.killing --kills $(KILLS)
	$(PY) -m pytest -m exhaustive tests/tokenmill $(PYTEST_ARGS)

cluster: $(VENV)/.dev.stamp  ## start S3, Kafka, Redis and all of our processes here, and send a file in by every door
	$(PY) -m tests.cluster examples/requests.jsonl --model demo

cluster-faults: $(VENV)/.dev.stamp  ## strike such a cluster with FAULTS=n faults drawn by SEED=n (WORKER=null|demo), and judge what is left
	OMP_NUM_THREADS=1 $(PY) -m tests.cluster.faults $(if $(SEED),--seed $(SEED)) --faults $(FAULTS) --worker $(WORKER)

hostile: $(VENV)/.dev.stamp  ## attack a cluster and serve with hostile input beside a well-behaved tenant, and judge (SEED=n, ATTACKS="'parquet: *'", FORM=cluster|serve)
	OMP_NUM_THREADS=1 $(PY) -m tests.hostile $(if $(SEED),--seed $(SEED)) $(if $(FORM),--form $(FORM)) $(if $(ATTACKS),--attacks $(ATTACKS)) $(HOSTILE_ARGS)

releases: $(VENV)/.dev.stamp  ## a rolling release on real processes: a bad version of a model is rolled back, a good one promoted
	OMP_NUM_THREADS=1 $(PY) -m pytest -s -m "exhaustive or not exhaustive" tests/tokenmill/services/test_releases.py $(PYTEST_ARGS)

simulate: $(VENV)/.dev.stamp  ## simulate SEEDS=n histories of one job, and of whole roots, with crashes, races and power cuts
	OMP_NUM_THREADS=1 $(PY) -m tests.simulation --seeds $(SEEDS)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m exhaustive tests/simulation

alerts:  ## check the alert rules and Prometheus's settings, and try each alert on made-up series (needs promtool)
	promtool check config infra/prometheus/prometheus.yml
	promtool check rules infra/prometheus/alerts.yml
	promtool test rules infra/prometheus/alerts_test.yml

observability: $(VENV)/.dev.stamp alerts  ## let Prometheus watch real processes: each dashboard's questions, each alert that can be brought about (needs prometheus)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m exhaustive -s tests/tokenmill/services/test_observability.py $(PYTEST_ARGS)

infra: $(VENV)-infra/linters.stamp  ## check Terraform, images and compose.yaml: fmt, validate, tests with mocks, checkov, hadolint (needs terraform)
	infra/check.sh
	$(VENV)-infra/linters/bin/checkov --quiet --compact --skip-download --framework terraform --directory infra/terraform
	$(VENV)-infra/linters/bin/hadolint infra/images/*.Dockerfile
	@if command -v promtool >/dev/null; then $(MAKE) --no-print-directory alerts; \
	else echo "skipped: alert rules, since promtool is not installed"; fi
	@if docker compose version >/dev/null 2>&1; then docker compose config --quiet; \
	elif command -v docker-compose >/dev/null; then docker-compose config --quiet; \
	else echo "skipped: compose.yaml, since docker compose is not installed"; fi

infra-apply: $(VENV)/.dev.stamp $(VENV)-infra/ministack.stamp  ## apply both examples to an AWS on this machine, run the pipeline there, destroy (needs terraform)
	OMP_NUM_THREADS=1 $(PY) -m infra.apply_locally --ministack $(VENV)-infra/ministack/bin/ministack

sbom: $(VENV)-infra/sbom.stamp  ## write what the images hold, with versions and licences, to out/sbom (IMAGES="control worker")
	$(PYTHON) -m infra.sbom --tool $(VENV)-infra/sbom/bin/cyclonedx-py $(IMAGES)

lint: $(VENV)/.dev.stamp  ## ruff, mypy and the import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev.stamp  ## let ruff fix and format what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.run.stamp  ## measure this machine: scheduler and pipeline alone, then the engine
	@$(PY) -m tokenmill bench --model demo

gpu-bench:  ## measure the engine on this machine's GPU, which needs torch, triton and transformers (GPU_PYTHON, GPU_ARGS=--dry-run)
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu --stage all --out out/gpu $(GPU_ARGS)

fuzz-http: $(VENV)/.dev.stamp  ## let schemathesis ask a gateway all that its OpenAPI document allows, and what it doesn't (EXAMPLES=n a route, SEED=n)
	OMP_NUM_THREADS=1 $(PY) -m tests.pipeline.gateway.fuzzing --examples $(EXAMPLES) $(if $(SEED),--seed $(SEED))

fleet: $(VENV)/.dev.stamp  ## real servers and processes, no model: a million requests over Kafka, then in a bucket (ROWS=n)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.fleet kafka --model demo --rows $(ROWS) --json benchmarks/results/fleet.json
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.fleet bucket --model demo --rows $(ROWS) --json benchmarks/results/fleet.json

streams: $(VENV)/.dev.stamp  ## a thousand streams on one gateway, real processes and no model; some stop reading, some hang up
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.streams --model demo --json benchmarks/results/streams.json

clean:  ## remove what was built; keeps the model cache
	rm -rf $(VENV) $(VENV)-infra $(VENV)-torch211 out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.pip.stamp:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "tokenmill needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.run.stamp: $(VENV)/.pip.stamp pyproject.toml constraints.txt
	@echo "installing torch, then tokenmill: minutes the first time, nothing after that" >&2
	$(PIP) --constraint $(CONSTRAINT) torch
	PIP_CONSTRAINT=$(CONSTRAINT) $(PIP) --editable ".[engine,gateway]"
	@touch $@

$(VENV)/.dev.stamp: $(VENV)/.run.stamp
	PIP_CONSTRAINT=$(CONSTRAINT) $(PIP) --group dev
	@touch $@

$(VENV)/.browser.stamp: $(VENV)/.dev.stamp
	PIP_CONSTRAINT=$(CONSTRAINT) $(PIP) --group browser
	@touch $@

# Beside torch and what goes with it (numpy: Triton 3.6's interpreter) all packages are those of $(VENV), found behind its own.
$(VENV)-torch211/.stamp: $(VENV)/.dev.stamp tests/cuda_stand_ins.py
	$(PY) -m venv --clear $(VENV)-torch211
	$(VENV)-torch211/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --no-deps torch==2.11.0 triton==3.6.0 "numpy<2.4"
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VENV)-torch211/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	$(PY) tests/cuda_stand_ins.py $$($(VENV)-torch211/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
	@touch $@

$(VENV)-infra/%.stamp: infra/%.txt
	$(PYTHON) -m venv $(VENV)-infra/$*
	$(VENV)-infra/$*/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --requirement $<
	@touch $@
