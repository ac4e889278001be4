# A worker whose engine is vLLM, on CUDA. It is an image of its own, because vLLM requires other versions of transformers,
# llguidance and FastAPI than worker.Dockerfile installs; vllm-constraints.txt pins them. Runs without root. The root file
# system may be read-only: it writes to /cache (weights, kernels) and /tmp. It holds no weights.
#
#   docker build -f infra/images/vllm.Dockerfile -t tokenmill-vllm .

# The base image's CUDA is that of torch in vllm-constraints.txt, 13.0, which needs NVIDIA's driver 580 or newer.
# The tag is in BASE, which hadolint doesn't look into (DL3006).
ARG BASE=nvidia/cuda:13.0.3-base-ubuntu24.04

# hadolint ignore=DL3006
FROM ${BASE} AS python
# FlashInfer and Triton compile kernels for the machine that they run on: with CUDA's compiler and headers, and with g++.
# CUDA's packages carry its version in their names; the base image sets CUDA_VERSION.
# Ubuntu keeps only the newest build of a package, so a pin would break with the next security update (DL3008).
# hadolint ignore=DL3008
RUN release="${CUDA_VERSION%.*}" \
    && cuda="${release%.*}-${release#*.}" \
    && apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
      "cuda-cudart-dev-$cuda" "cuda-cuobjdump-$cuda" "cuda-nvcc-$cuda" "cuda-nvrtc-dev-$cuda" \
      "libcublas-dev-$cuda" "libcurand-dev-$cuda" \
    && rm -rf /var/lib/apt/lists/*

FROM python AS build
WORKDIR /src
RUN python3 -m venv /opt/tokenmill
COPY infra/images/vllm-constraints.txt ./
# vLLM has a layer of its own: with torch and CUDA's libraries it is most of the image, and changes least. Bytecode is
# compiled, unlike in the worker's image: each start, and each rank of a model, imports thousands of modules.
RUN PIP_CONSTRAINT=/src/vllm-constraints.txt /opt/tokenmill/bin/python -m pip install --no-cache-dir vllm
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY schemas schemas
COPY pipeline pipeline
COPY engine engine
COPY workers workers
COPY tokenmill tokenmill
RUN PIP_CONSTRAINT=/src/vllm-constraints.txt /opt/tokenmill/bin/python -m pip install --no-cache-dir \
      ".[aws,engine,metrics,redis,tracing,vllm]"

FROM python
RUN groupadd --gid 10001 tokenmill \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tokenmill \
    && install -d -o 10001 -g 10001 -m 0750 /cache
COPY --from=build /opt/tokenmill /opt/tokenmill
# vLLM sends usage statistics unless a variable forbids it.
ENV PATH=/opt/tokenmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENMILL_ENGINE=vllm \
    TOKENMILL_MODEL_CACHE=/cache/models \
    TOKENMILL_NATIVE_CACHE=/cache/native \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache/xdg \
    FLASHINFER_WORKSPACE_BASE=/cache/flashinfer \
    CUDA_HOME=/usr/local/cuda \
    VLLM_NO_USAGE_STATS=1 \
    DO_NOT_TRACK=1
VOLUME ["/cache", "/tmp"]
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenmill"]
