# A worker: the engine and its kernels. A compiler stays in the image, since kernels are compiled for the machine that they
# run on. Runs without root. The root file system may be read-only: it writes to /cache (weights, kernels) and /tmp.
#
#   docker build -f infra/images/worker.Dockerfile -t tokenmill-worker .
#
# For machines without a GPU, some gigabytes smaller:
#
#   docker build -f infra/images/worker.Dockerfile -t tokenmill-worker-cpu \
#     --build-arg BASE=ubuntu:24.04 --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .

# With flash-attn (docs/gpu.md), which is compiled for torch's CUDA: the build stage then needs that CUDA's nvcc, and hours of a
# core.
#
#   docker build -f infra/images/worker.Dockerfile -t tokenmill-worker-flash \
#     --build-arg FLASH_ATTN=1 --build-arg BUILD_BASE=nvidia/cuda:MAJOR.MINOR.PATCH-devel-ubuntu24.04 .

# CUDA's libraries come with torch; the base image connects them to the driver.
# The tag is in BASE, which hadolint doesn't look into (DL3006).
ARG BASE=nvidia/cuda:12.8.1-base-ubuntu24.04
ARG BUILD_BASE=${BASE}

# hadolint ignore=DL3006
FROM ${BASE} AS python
# Ubuntu keeps only the newest build of a package, so a pin would break with the next security update (DL3008).
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM ${BUILD_BASE} AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX=
ARG FLASH_ATTN=
WORKDIR /src
RUN python3 -m venv /opt/tokenmill
COPY infra/images/constraints.txt ./
# torch has a layer of its own: it is most of the image, and changes least.
RUN PIP_CONSTRAINT=/src/constraints.txt /opt/tokenmill/bin/python -m pip install --no-cache-dir --no-compile \
      ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY schemas schemas
COPY pipeline pipeline
COPY engine engine
COPY workers workers
COPY tokenmill tokenmill
RUN PIP_CONSTRAINT=/src/constraints.txt /opt/tokenmill/bin/python -m pip install --no-cache-dir --no-compile \
      ".[aws,engine,metrics,redis,tracing]"
# Without build isolation, because flash-attn is compiled against the installed torch.
RUN if [ -n "$FLASH_ATTN" ]; then \
      PIP_CONSTRAINT=/src/constraints.txt /opt/tokenmill/bin/python -m pip install --no-cache-dir --no-compile \
        ninja packaging psutil setuptools wheel \
      && PIP_CONSTRAINT=/src/constraints.txt /opt/tokenmill/bin/python -m pip install --no-cache-dir --no-compile \
        --no-build-isolation ".[gpu]"; \
    fi

FROM python
RUN groupadd --gid 10001 tokenmill \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tokenmill \
    && install -d -o 10001 -g 10001 -m 0750 /cache
COPY --from=build /opt/tokenmill /opt/tokenmill
ENV PATH=/opt/tokenmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    TOKENMILL_MODEL_CACHE=/cache/models \
    TOKENMILL_NATIVE_CACHE=/cache/native \
    TRITON_CACHE_DIR=/cache/triton \
    XDG_CACHE_HOME=/cache/xdg
VOLUME ["/cache", "/tmp"]
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenmill"]
