# The control side: intake, dispatcher, gateway and the command line. Has no torch and no compiler, and runs without root.
# The root file system may be read-only: processes write only to /tmp.
#
#   docker build -f infra/images/control.Dockerfile -t tokenmill-control .

# The tag is in BASE, which hadolint doesn't look into (DL3006).
ARG BASE=python:3.12-slim-bookworm

# hadolint ignore=DL3006
FROM ${BASE} AS build
WORKDIR /src
RUN python -m venv /opt/tokenmill
COPY infra/images/constraints.txt ./
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY schemas schemas
COPY pipeline pipeline
COPY engine engine
COPY workers workers
COPY tokenmill tokenmill
RUN PIP_CONSTRAINT=/src/constraints.txt /opt/tokenmill/bin/python -m pip install --no-cache-dir --no-compile \
      ".[aws,gateway,kafka,metrics,redis,tracing]" \
    && /opt/tokenmill/bin/python -m compileall -q /opt/tokenmill/lib

# hadolint ignore=DL3006
FROM ${BASE}
RUN groupadd --gid 10001 tokenmill \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tokenmill
COPY --from=build /opt/tokenmill /opt/tokenmill
ENV PATH=/opt/tokenmill/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
# A volume takes its owner and mode from this folder; on Fargate a mounted volume would belong to root otherwise.
VOLUME /tmp
USER 10001:10001
WORKDIR /tmp
STOPSIGNAL SIGTERM
ENTRYPOINT ["tokenmill"]
