# The Tokenloom server, with what reads from the Hub and from object stores.
#
#     docker build -t tokenloom .
#     docker run --rm tokenloom --help
#     docker build --build-arg PACKAGES=image-slim -t tokenloom:slim .    # for files alone
#
# docker-compose.yml runs it with its ledger. Bases are pinned by .ci/pin-images.

FROM python:3.11.14-slim-bookworm AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# Every package by its hash, those that build the wheel in an environment of their own.
COPY requirements requirements
RUN python -m venv /opt/build \
    && /opt/build/bin/pip install --require-hashes -r requirements/release.txt
# A file of requirements/: image, or image-slim.
ARG PACKAGES=image
RUN python -m venv --without-pip /opt/tokenloom \
    && /opt/build/bin/pip --python /opt/tokenloom/bin/python install \
        --require-hashes --only-binary=:all: -r requirements/$PACKAGES.txt
COPY pyproject.toml README.md LICENSE ./
COPY client client
COPY proto proto
COPY server server
COPY examples examples
# Of the packages a server uses neither tests, nor what compiles against them, nor Arrow's network (it reads through
# fsspec), nor any command but its own.
RUN /opt/build/bin/python -m build --no-isolation --wheel \
    && /opt/build/bin/pip --python /opt/tokenloom/bin/python install --no-deps --no-index dist/*.whl \
    && /opt/build/bin/pip --python /opt/tokenloom/bin/python check \
    && cd /opt/tokenloom \
    && find lib -type d '(' -name tests -o -name include -o -path '*/pyarrow/src' ')' -prune -exec rm -r {} + \
    && find lib '(' -path '*/pyarrow/*_flight*' -o -path '*/pyarrow/*_s3*' -o -path '*/pyarrow/*.so.*.*' \
        -o -name '*.a' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.pyx' ')' -delete \
    && find bin ! -type d ! -name 'python*' ! -name tokenloom -delete

FROM python:3.11.14-slim-bookworm
ARG VERSION=unreleased
LABEL org.opencontainers.image.title="tokenloom" \
      org.opencontainers.image.description="A data-loader service for language-model training" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.source="https://github.com/tokenloom/tokenloom"

# A fixed id, so that a folder on the host can be made readable for it. /config is where the mixture file
# is mounted, with its data beside it; the index cache is the one place there that the server writes to.
# Nothing is installed later, so the base's pip goes, and its other commands.
RUN groupadd --gid 10001 tokenloom \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin tokenloom \
    && install -d /config /config/data \
    && install -d -o tokenloom -g tokenloom /config/.tokenloom-index \
    && cd /usr/local \
    && rm -rf lib/python3.11/site-packages/* lib/python3.11/ensurepip lib/python3.11/idlelib lib/python3.11/lib2to3 \
    && find bin ! -type d '(' ! -name 'python*' -o -name '*-config' ')' -delete
COPY --from=build /opt/tokenloom /opt/tokenloom
ENV PATH=/opt/tokenloom/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    TOKENLOOM_HEALTH=127.0.0.1:8081
WORKDIR /config
USER 10001:10001
EXPOSE 50051 8080
STOPSIGNAL SIGTERM
# Health has a listener of its own, which answers also while others hold all connections of REST. Shown a token, the
# server's own or the one of its environment, it says why it is not ready; an error is one line without a traceback.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import http.client, os, pathlib, sys; \
sys.tracebacklimit = 0; \
made = pathlib.Path('/config/.tokenloom-index/token'); \
token = os.environ.get('TOKENLOOM_TOKEN') or (made.read_text().strip() if made.exists() else ''); \
asked = http.client.HTTPConnection('127.0.0.1:8081', timeout=4); \
asked.request('GET', '/readyz', headers={'Authorization': f'Bearer {token}'}); \
answer = asked.getresponse(); \
sys.exit(answer.status != 200 and answer.read().decode())"]
ENTRYPOINT ["tokenloom"]
CMD ["--help"]
