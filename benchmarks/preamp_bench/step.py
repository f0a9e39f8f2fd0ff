# SPDX-License-Identifier: BSD-3-Clause
"""Time everything between ``backward`` and the next forward: check, unscale, clip, update, round.

The model is only its parameters, and gradients are put in place instead of computed, so that no
forward or backward hides the difference. Every variant runs AdamW with the same settings.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from preamp.core.dtypes import dtype_name
from preamp_bench import preamp_steps, records, torch_steps
from preamp_bench.harness import Effort, Row, Variant, measure, stopwatch, wait_for
from preamp_bench.memory import proc_bytes
from preamp_bench.peers import of_module
from preamp_bench.preamp_steps import MakeOptimizer, fused_adam, through_engine, torch_adamw
from preamp_bench.weights import Gradients, StepCase, Work

Bytes = Callable[[StepCase], int]
COPY = "copy"
_COPIED_AT_MOST = 2**29
"""Bytes that the copy moves; many times any cache."""

_BYTES_TO_HOLD = {torch.float16: 150, torch.bfloat16: 190}
"""Memory that all variants of a case need together, in bytes per parameter, generously."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A row of the table of variants."""

    name: str  # name in the rows
    # Makes it ready to run; its tensors exist from then on.
    build: Callable[[StepCase, Gradients], Work]
    # What a step moves at least, in bytes per parameter of the case.
    bytes: Bytes
    may_fail: bool = False  # whether it depends on more than torch and may be missing here


def _fp32(case: StepCase) -> int:
    return case.fp32_bytes


def _half(case: StepCase) -> int:
    return case.half_bytes


def _split(case: StepCase) -> int:
    """As with masters, which are read and written in 16 bits, and so are the half weights."""
    return case.half_bytes - 2


def _compact(case: StepCase) -> int:
    """The same with 8 bits of each moment; their scales are 0.1 bytes and left out."""
    return case.half_bytes - 2 - 12


def _bf16_only(state: int, case: StepCase) -> int:
    """A norm, the gradient, the weight, and ``state`` bytes that are read and written."""
    return 2 * case.clip + 2 + 4 + 2 * state


def _peer(
    name: str, module: str, kind: str, state: int, *, least: int = 1, **options: object
) -> Contender:
    return Contender(
        name=name,
        build=of_module(module, kind, least=least, **options),
        bytes=partial(_bf16_only, state),
        may_fail=True,
    )


def _ours(
    level: str, name: str, make: MakeOptimizer, storage: str = "full", size: Bytes = _half
) -> Contender:
    build = through_engine(level, make, storage)
    return Contender(name=f"preamp {level}{name}", build=build, bytes=size)


FP32 = (
    Contender(name="GradScaler + fused AdamW", build=torch_steps.grad_scaler, bytes=_fp32),
    _ours("O0", ", torch AdamW", torch_adamw, size=_fp32),
    _ours("O0", ", FusedAdam", fused_adam, size=_fp32),
)

HALF = {
    half: (
        Contender(name="torch, naive", build=torch_steps.naive_masters, bytes=_half),
        Contender(name="torch, kept buffers", build=torch_steps.kept_masters, bytes=_half),
        Contender(
            name="torch.compile", build=torch_steps.compiled_masters, bytes=_half, may_fail=True
        ),
        _ours(level, ", torch AdamW", torch_adamw),
        _ours(level, ", FusedAdam", fused_adam),
        _ours(level, " split, FusedAdam", fused_adam, "split", _split),
        _ours(level, " compact, FusedAdam", fused_adam, "compact", _compact),
        Contender(name="preamp ops", build=preamp_steps.through_ops, bytes=_half),
    )
    for half, level in ((torch.float16, "O2"), (torch.bfloat16, "O5"))
}

WITH_MASTERS = (
    Contender(
        name="TransformerEngine FusedAdam",
        build=of_module("transformer_engine.pytorch.optimizers", "FusedAdam", master_weights=True),
        bytes=_half,
        may_fail=True,
    ),
)
"""Of other packages, with float32 masters of bfloat16 weights."""

BF16_ONLY = (
    Contender(
        name="torch AdamW, no masters",
        build=of_module("torch.optim", "AdamW", fused=True),
        bytes=partial(_bf16_only, 4),
    ),
    _peer("optimi AdamW, Kahan", "optimi", "AdamW", 6, foreach=True, kahan_sum=True),
    _peer(
        "torchao AdamW8bit", "torchao.optim", "AdamW8bit", 2, least=4096, bf16_stochastic_round=True
    ),
    _peer("flashoptim AdamW", "flashoptim", "FlashAdamW", 3),
)
"""Without float32 masters; only where the half is bfloat16."""


def grid(
    parameters: Sequence[int], tensors: Sequence[int], clips: Sequence[bool], device: torch.device
) -> list[StepCase]:
    """List the cases of a run."""
    return [
        StepCase(parameters=count, tensors=number, half=half, clip=clip, device=device)
        for count, number, clip, half in product(parameters, tensors, clips, HALF)
    ]


def run_case(case: StepCase, effort: Effort, threads: int = 1) -> list[records.Record]:
    """Measure all variants of one case.

    Mutates:
        torch's number of threads.
    """
    torch.set_num_threads(threads)
    facts = _facts_of(case)
    lacking = _lacking_memory(case)
    if lacking:
        return [records.not_measured("all variants", "all", lacking, **facts)]
    variants, failed, sizes = _build(case)
    variants.append(_copy(case))
    rows = measure(variants, effort)
    bandwidth = 2 * _copied_bytes(case) / rows[-1].best / 1e6  # GB/s: read and written
    facts["copy_gb_s"] = bandwidth
    variants.clear()  # the tensors go before the next case needs theirs
    gc.collect()
    done = [_record(row, sizes[row.name], facts) for row in rows]
    return [*done, *(records.not_measured(*lines, **facts) for lines in failed)]


def _facts_of(case: StepCase) -> records.Record:
    return {
        "benchmark": "step",
        "parameters": case.parameters,
        "tensors": case.tensors,
        "half": dtype_name(case.half),
        "clip": case.clip,
        **records.provenance(case.device),
    }


def _record(row: Row, size: float, facts: records.Record) -> records.Record:
    speed = size * facts["parameters"] / row.best / 1e6
    return records.measured(
        row, bytes_per_parameter=size, share_of_copy=speed / facts["copy_gb_s"], **facts
    )


def _build(case: StepCase) -> tuple[list[Variant], list[tuple[str, str, str]], dict[str, float]]:
    """Variants that run here, the others with the reason, and bytes per parameter."""
    variants: list[Variant] = []
    failed: list[tuple[str, str, str]] = []
    sizes: dict[str, float] = {COPY: 2 * _copied_bytes(case) / case.parameters}
    wait = partial(wait_for, case.device)
    for group, contender, gradients in _contenders(case):
        try:
            step = contender.build(case, gradients).step
            step()
        except Exception as error:
            if not contender.may_fail:
                raise
            failed.append((contender.name, group, records.reason_of(error)))
            continue
        seconds = stopwatch(step, prepare=gradients.refill, synchronize=wait)
        variants.append(Variant(name=contender.name, group=group, seconds=seconds))
        sizes[contender.name] = contender.bytes(case)
    return variants, failed, sizes


def _contenders(case: StepCase) -> Iterator[tuple[str, Contender, Gradients]]:
    wide = Gradients(case, torch.float32, 2.0**16)
    narrow = Gradients(case, case.half, case.scale)
    half = dtype_name(case.half)
    yield from (("float32", contender, wide) for contender in FP32)
    yield from ((half, contender, narrow) for contender in HALF[case.half])
    if case.half is torch.bfloat16:
        yield from ((half, contender, narrow) for contender in WITH_MASTERS)
        yield from (("bfloat16 only", contender, narrow) for contender in BF16_ONLY)


def _copied_bytes(case: StepCase) -> int:
    """As many bytes as a step reads or writes, within reason."""
    return min(16 * case.parameters, _COPIED_AT_MOST // 2)


def _copy(case: StepCase) -> Variant:
    """A plain copy: the speed limit of everything else."""
    count = _copied_bytes(case) // 4
    source, target = (torch.zeros(count, device=case.device) for _ in range(2))
    seconds = stopwatch(lambda: target.copy_(source), synchronize=partial(wait_for, case.device))
    return Variant(name=COPY, group=COPY, seconds=seconds)


def _lacking_memory(case: StepCase) -> str:
    """Why the case does not fit into memory, or nothing."""
    needed = _BYTES_TO_HOLD[case.half] * case.parameters + _COPIED_AT_MOST
    free = _free_bytes(case.device)
    if needed <= free:
        return ""
    return f"needs about {needed / 2**30:.0f} GiB, {free / 2**30:.0f} GiB are free"


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    try:
        # What earlier cases gave back the C library may have kept for this process.
        return proc_bytes("meminfo", "MemAvailable") + proc_bytes("self/status", "VmRSS")
    except OSError:
        return float("inf")  # unknown: try
