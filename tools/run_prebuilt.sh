#!/usr/bin/env bash
# Runs tests or benchmarks on a GPU machine that has no network, with an ops library built elsewhere.
#
#   1. where nvcc is:  FASTINFER_CUDA=1 python setup.py develop_inplace
#   2. copy the tree with fastinfer/_ops.so to the GPU machine
#   3. there:          tools/run_prebuilt.sh pytest tests/gpu -q
#
# The ops library holds no Python ABI and runs as it is; the small host module is built here for this Python.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
[ -f fastinfer/_ops.so ] || { echo "fastinfer/_ops.so is missing: build it first (see the head of this script)" >&2; exit 1; }
FASTINFER_CUDA=0 "$PYTHON" setup.py -q develop_inplace --host-only
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m "$@"
