#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Everything that only a GPU can show: tests with its device among them, compute-sanitizer over the
# kernels, the demo, the benchmarks. Uses the interpreter's own torch; installs nothing.
#   tools/gpu.sh OUT_FOLDER [PYTHON [PART...]]
# A part that fails is noted in OUT_FOLDER/summary.txt and the others still run; gpu.log has what
# they print. LIMIT is the time for each, in seconds. Parts, in the order in which they run:
parts=(kernels devices memory rest demo step train)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
out=$(mkdir -p "${1:?usage: tools/gpu.sh OUT_FOLDER [PYTHON [PART...]]}" && cd "$1" && pwd) || exit
python=${2:-python3}
shift $(($# < 2 ? $# : 2))
(($#)) && parts=("$@")
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
failed=0

has() { "$python" -c "import $1" 2>/dev/null; }

# Compiling kernels takes most of the time, so several processes share the GPU.
tests() {
    local workers=()
    has xdist && workers=(-n 8)
    "$python" -m pytest -q -p no:cacheprovider ${workers[@]+"${workers[@]}"} "$@"
}

# Without torch's cache of memory each tensor has an allocation of its own, with a checked end.
memory() {
    if ! command -v compute-sanitizer; then
        echo "compute-sanitizer is not installed"
        return
    fi
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$python" -m pytest -q -p no:cacheprovider tests/devices/test_triton.py
}

run() {
    case $1 in
        kernels) tests tests/kernels ;;
        devices) tests -rs tests/devices ;;
        memory) memory ;;
        rest) tests tests/engine tests/casting tests/optim tests/multi_tensor tests/fp16_utils \
            tests/flat tests/normalization tests/scaling tests/demo ;;
        demo) "$python" -m preamp demo --device cuda --out "$work/demo" \
            && tar -C "$work" -czf "$out/demo.tgz" demo ;;
        step) "$python" benchmarks/bench_step.py --device cuda --params 1e6,1e7,1e8 --clips both --out "$out/step.jsonl" ;;
        train) "$python" benchmarks/bench_train.py --device cuda --out "$out/train.jsonl" ;;
        *) echo "no such part: $1; there are kernels devices memory rest demo step train" && false ;;
    esac
}

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' \
    2>&1 | tee "$out/summary.txt" || exit 1
export -f has tests memory run
export python out work
for part in "${parts[@]}"; do
    start=$SECONDS
    echo "== $part" | tee -a "$out/gpu.log"
    timeout "${LIMIT:-900}" bash -c 'run "$1"' - "$part" 2>&1 | tee -a "$out/gpu.log"
    status=${PIPESTATUS[0]}
    ((status)) && failed=1
    echo "$part: status $status, $((SECONDS - start)) s" | tee -a "$out/summary.txt"
done
exit "$failed"
