# The daemon. From the repository's root:  docker build -f deploy/docker/server.Dockerfile -t gradcomm-server:0.1.0 .
# Both stages need Debian's Python, or one at the same place; BASE may name any such image.
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY proto proto
COPY gcclient gcclient
COPY gcserver gcserver
# the exact versions that gradcomm is tested with
RUN python3 -m venv /opt/gradcomm \
    && /opt/gradcomm/bin/pip install --no-cache-dir --constraint constraints.txt ".[server]"

FROM ${BASE}
# what the chart's `uid` says; folders for those who mount none there
RUN groupadd --gid 10001 gradcomm \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin gradcomm \
    && install --directory --owner=10001 --group=10001 --mode=0700 /run/gradcomm /state /cache
COPY --from=build /opt/gradcomm /opt/gradcomm
ENV PATH=/opt/gradcomm/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONFAULTHANDLER=1 \
    CACHE_DIRECTORY=/cache \
    NUMBA_CACHE_DIR=/cache/kernels \
    GC_NODE_SOCKET=/run/gradcomm/daemon.sock \
    GC_NODE_ADMIN=unix:/run/gradcomm/admin.sock
USER 10001:10001
VOLUME ["/cache"]
EXPOSE 7470 7471
# the first start compiles the kernels into /cache, most of a minute
HEALTHCHECK --start-period=5m --interval=30s --timeout=10s CMD ["gcserver", "health"]
ENTRYPOINT ["gcserver"]
CMD ["run"]
