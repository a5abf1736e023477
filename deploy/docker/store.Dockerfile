# The store. Build from the repository's root:
#   docker build -f deploy/docker/store.Dockerfile -t kvblend-store:0.1.0 .
FROM python:3.11-slim-bookworm AS build
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /source
COPY pyproject.toml requirements.lock README.md LICENSE ./
COPY kvblend kvblend
COPY services services
# Versions and hashes come from the lock file; uv verifies both. As a constraint: it locks development's tools too.
# Bytecode: the file system that it runs on is read-only, so each start would compile all sources anew.
RUN uv venv /app \
    && uv pip install --python /app --no-cache --compile-bytecode --constraint requirements.lock '.[services]'

FROM python:3.11-slim-bookworm
COPY --from=build /app /app
# Numba keeps compiled kernels there: the file system itself is read-only.
ENV PATH=/app/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.store"]
