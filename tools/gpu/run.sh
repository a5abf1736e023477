#!/bin/bash
# Tests and bench on a machine with NVIDIA GPUs and no package registry: its python3 has a CUDA build of torch,
# Triton, numba and pytest; everything else comes from a folder of wheels for it.
#
#   tools/gpu/run.sh WHEELS RESULTS [test|bench|all] [arguments of pytest, or with `bench` of the bench]
set -uo pipefail
wheels=$1 results=$2 what=${3:-all}
shift 3 || shift $#
cd "$(dirname "$0")/../.."
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" "$wheels"/*.whl || exit 1
# Services ask for the version of the package that they belong to.
mkdir "$site/kvblend-0.dist-info"
printf 'Metadata-Version: 2.1\nName: kvblend\nVersion: 0.1.0\n' >"$site/kvblend-0.dist-info/METADATA"
export PYTHONPATH="$site:$PWD" PYTHONUNBUFFERED=1
mkdir -p "$results"
status=0
if [ "$what" != bench ]; then
    python3 -m pytest -m gpu tests/gpu_agent -s "$@" 2>&1 | tee "$results/test-gpu.txt" || status=1
fi
if [ "$what" != test ]; then
    [ "$what" = bench ] || set --
    python3 -m benchmarks.gpu "$@" 2>&1 | tee "$results/bench-gpu.txt" || status=1
    cp build/bench/gpu*.json "$results/" 2>/dev/null
fi
exit $status
