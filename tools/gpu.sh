#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
# Everything that only a GPU can show, in half an hour. Uses the interpreter's torch; installs
# nothing but what is asked for beforehand (pip install -e '.[dev]', flashoptim, transformer_engine).
#   tools/gpu.sh [--dry] OUT_FOLDER [PYTHON [PART...]]
# Parts, or the groups a to d, each of which fits ten minutes, in the order of what they are worth:
groups=(a b c d)
declare -A parts_of=(
    [a]="kernels devices memory" # results, waits, access to memory
    [b]="step"                   # a copy, then optimizer steps beside torch's and others'
    [c]="gpt demo"               # whole steps of 122 million parameters, memory; every level trains
    [d]="graphs checkpoint"
)
# Seconds for each; LIMIT in the environment takes the place of all of them.
declare -A limits=(
    [kernels]=220 [devices]=240 [memory]=120 [step]=540
    [gpt]=280 [demo]=160 [graphs]=90 [checkpoint]=90
)
# A part that fails, is skipped, or takes too long does not stop the others: OUT_FOLDER/summary.txt
# says so for each, gpu.log has what they print, and *.jsonl have a row for all that was measured,
# written as it was. --dry runs all but the graphs in small on the pretended device of tests/devices.
set -uo pipefail
dry=
[[ ${1:-} == --dry ]] && dry=1 && shift
out=$(mkdir -p "${1:?usage: tools/gpu.sh [--dry] OUT_FOLDER [PYTHON [PART...]]}" && cd "$1" && pwd) || exit
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${2:-python3}
shift $(($# < 2 ? $# : 2))
(($#)) || set -- "${groups[@]}"
parts=()
for part in "$@"; do
    for name in ${parts_of[$part]:-$part}; do
        [[ -n ${limits[$name]:-} ]] || { echo "no such part: $name; there are ${parts_of[*]}" >&2; exit 2; }
        parts+=("$name")
    done
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
if [[ $dry ]]; then # every process of Python begins with the pretended device
    printf '%s\n' 'import devices.pretended.plugin as pretended' 'pretended.pytest_configure()' \
        >"$work/sitecustomize.py"
    export PYTHONPATH=$work:$PYTHONPATH
fi
SKIPPED=77
failed=0

has() { "$python" -c "import importlib.util as i, sys; sys.exit(i.find_spec('$1') is None)"; }

skip() {
    echo "skipped: $*"
    return "$SKIPPED"
}

# Compiling kernels takes most of the time, so several processes share the GPU.
tests() {
    local workers=()
    [[ $dry ]] || { has xdist && workers=(-n 8); }
    "$python" -m pytest -v -rs -p no:cacheprovider ${workers[@]+"${workers[@]}"} "$@"
}

# Without torch's cache of memory each tensor has an allocation of its own, with a checked end.
memory() {
    command -v compute-sanitizer >/dev/null || { skip "compute-sanitizer is not installed"; return; }
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        "$python" -m pytest -v -p no:cacheprovider tests/devices/test_triton.py
}

run() {
    local params=1e8 tensors=148,291,10000 seconds=2 small= demo=(--levels O0 autocast O5 O2 O4 O1 O3)
    local kernels=(tests/kernels) devices=(tests/devices) # of their combinations a selection
    if [[ $dry ]]; then
        params=2e4 tensors=3 seconds=0 small=--small
        demo+=(--steps 2 --small)
        kernels=(tests/kernels/triton/test_tables.py -k layout) devices=(tests/devices/test_pretended.py -k "not triton")
    fi
    case $1 in
        kernels) tests "${kernels[@]}" ;;
        devices) tests "${devices[@]}" ;;
        memory) memory ;;
        step) "$python" benchmarks/bench_step.py --device cuda --params $params --tensors $tensors \
            --seconds $((20 * seconds)) --out "$out/step.jsonl" ;;
        gpt | checkpoint) "$python" benchmarks/bench_gpu.py "$1" --out "$out/$1.jsonl" $small ;;
        graphs)
            [[ ! $dry ]] || { skip "the pretended device has no graphs"; return; }
            "$python" benchmarks/bench_gpu.py graphs --out "$out/graphs.jsonl" ;;
        demo) "$python" examples/00_demo.py --device cuda "${demo[@]}" \
            --picture "$out/demo.svg" --json "$out/demo.json" ;;
    esac
}

"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())' \
    2>&1 | tee "$out/summary.txt" || exit 1
export -f has skip tests memory run
export python out work dry SKIPPED
for part in "${parts[@]}"; do
    start=$SECONDS
    echo "== $part" | tee -a "$out/gpu.log"
    timeout -k 10 "${LIMIT:-${limits[$part]}}" bash -c 'run "$1"' - "$part" 2>&1 | tee -a "$out/gpu.log"
    status=${PIPESTATUS[0]}
    case $status in
        0) said=done ;;
        "$SKIPPED") said=skipped ;;
        124 | 137) said="out of time" failed=1 ;;
        *) said="failed, status $status" failed=1 ;;
    esac
    echo "$part: $said, $((SECONDS - start)) s" | tee -a "$out/summary.txt"
done
exit "$failed"
