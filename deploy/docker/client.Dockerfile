# Training with gradcomm: torch, the client and the examples.
#   docker build -f deploy/docker/client.Dockerfile -t gradcomm-client:0.1.0 .
# On an image of yours that has torch:  --build-arg BASE=IMAGE
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY proto proto
COPY gcclient gcclient
COPY gcserver gcserver
RUN python3 -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${BASE}
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/
# with the packages of the image, so that a torch that is there stays; one without gets the version of the tests
RUN python3 -m venv --system-site-packages /opt/gradcomm \
    && { /opt/gradcomm/bin/python -c "import torch" \
        || /opt/gradcomm/bin/pip install --no-cache-dir --constraint /wheels/constraints.txt torch; } \
    && /opt/gradcomm/bin/pip install --no-cache-dir /wheels/*.whl \
    && rm -r /wheels
COPY examples /opt/gradcomm/examples
RUN groupadd --gid 10001 gradcomm \
    && useradd --uid 10001 --gid 10001 --create-home --shell /bin/bash gradcomm
# GLIBC_TUNABLES: blocks of gradients are copied around the caches, as docs/operating.md has it
ENV PATH=/opt/gradcomm/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=1048576${GLIBC_TUNABLES:+:$GLIBC_TUNABLES} \
    GC_NODE_SOCKET=/run/gradcomm/daemon.sock
USER 10001:10001
WORKDIR /home/gradcomm
CMD ["python"]
