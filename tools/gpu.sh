#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Everything that only a GPU can show, in one go: the tests with its device among them, the demo,
# the benchmark. Uses the interpreter's own torch; installs nothing. Results go to the folder given.
#   tools/gpu.sh OUT_FOLDER [PYTHON]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:?usage: tools/gpu.sh OUT_FOLDER [PYTHON]}
python=${2:-python3}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
mkdir -p "$out"
failed=0

"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' || exit 1
"$python" -m pytest -q tests/devices tests/engine tests/casting tests/optim tests/multi_tensor tests/fp16_utils \
    tests/flat tests/normalization -p no:cacheprovider \
    2>&1 | tee "$out/tests.log" || failed=1
"$python" -m preamp demo --device cuda --out "$out/demo" 2>&1 | tee "$out/demo.log" || failed=1
"$python" benchmarks/bench_step.py --device cuda 2>&1 | tee "$out/bench.log" || failed=1
cp benchmarks/results/*.jsonl "$out"/ 2>/dev/null
exit "$failed"
