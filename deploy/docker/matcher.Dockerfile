# The matcher. Build from the repository's root:
#   docker build -f deploy/docker/matcher.Dockerfile -t kvblend-matcher:0.1.0 .
# The processor that its kernels are compiled for, as LLVM names it: not the one that happens to build the image. This
# one is every x86 server's since about 2015, and code for newer ones is no faster; on older ones it ends with an
# illegal instruction, so for them: --build-arg KERNEL_CPU=generic.
ARG KERNEL_CPU=x86-64-v3

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
# Kernels are compiled here, beside their sources in /app, so that a pod is ready in seconds and not in a minute.
# -P: from /app, where they will run, and not from this folder.
ARG KERNEL_CPU
RUN NUMBA_CPU_NAME="$KERNEL_CPU" NUMBA_CPU_FEATURES="" /app/bin/python -P -c \
    "from services.matcher.warm_up import compile_kernels; compile_kernels()"

FROM python:3.11-slim-bookworm
COPY --from=build /app /app
ARG KERNEL_CPU
# The file system itself is read-only, and Numba reads only where it can write: what was compiled is copied to
# NUMBA_CACHE_DIR at the first start (5 MB). Started with another NUMBA_CPU_NAME, kernels are compiled again, there.
ENV PATH=/app/bin:$PATH PYTHONUNBUFFERED=1 NUMBA_CACHE_DIR=/tmp/numba \
    NUMBA_CPU_NAME="$KERNEL_CPU" NUMBA_CPU_FEATURES=""
USER 10001:10001
ENTRYPOINT ["python", "-m", "services.matcher"]
