# The GPU agent as a container of its own, for engines whose container does not run it.
# Build from the repository's root:
#   docker build -f deploy/docker/gpu_agent.Dockerfile -t kvblend-gpu-agent:0.1.0 .
FROM python:3.11-slim-bookworm AS build
# An index to take torch from instead of the default one: builds without CUDA are a tenth of the size.
ARG TORCH_INDEX=
RUN pip install --no-cache-dir uv==0.13.9
WORKDIR /source
COPY pyproject.toml requirements.lock requirements-torch.txt README.md LICENSE ./
COPY kvblend kvblend
COPY services services
# Versions and hashes come from the lock file; uv verifies both. As a constraint: it locks development's tools too.
# Torch is pinned apart, as its builds differ.
# Bytecode: the file system that it runs on is read-only, so each start would compile all sources anew.
RUN uv venv /app \
    && uv pip install --python /app --no-cache --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
        -r requirements-torch.txt \
    && uv pip install --python /app --no-cache --compile-bytecode \
        --constraint requirements.lock --constraint requirements-torch.txt '.[agent]'

FROM python:3.11-slim-bookworm
COPY --from=build /app /app
# Numba keeps compiled kernels there: the file system itself is read-only.
ENV PATH=/app/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.gpu_agent"]
