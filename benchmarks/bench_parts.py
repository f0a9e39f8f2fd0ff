# SPDX-License-Identifier: BSD-3-Clause
"""What a step is made of: update rules by back end and thread, and the engine's bookkeeping.

Rows are appended to ``benchmarks/results/parts.jsonl``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch

from preamp.core.errors import PreampUnavailableError
from preamp.kernels import Census, Ops, Rule, Update, backend
from preamp.kernels.by_device import ByDevice
from preamp.kernels.rules import (
    AdagradRule,
    AdamRule,
    BiasCorrection,
    LambRule,
    LarsRule,
    NovoGradRule,
    SgdRule,
)
from preamp_bench import records
from preamp_bench.harness import Effort, Variant, measure, stopwatch
from preamp_bench.options import RESULTS, asked
from preamp_bench.preamp_steps import fused_adam, through_engine
from preamp_bench.weights import Gradients, StepCase, Weights

_MOMENTS: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
_DECAYS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
RULES: dict[str, tuple[Rule, int]] = {
    "AdamW": (
        AdamRule(
            **_MOMENTS, weight_decay=0.01, decoupled=True, bias_correction=BiasCorrection.MOMENTS
        ),
        2,
    ),
    "LAMB": (
        LambRule(
            **_MOMENTS, weight_decay=0.01, decoupled=True, bias_correction=True,
            grad_averaging=True, uses_trust_ratio=True,
        ),
        2,
    ),
    "SGD with momentum": (SgdRule(**_DECAYS, momentum=0.9, dampening=0.0, nesterov=False), 1),
    "NovoGrad": (
        NovoGradRule(
            **_MOMENTS, weight_decay=0.01, bias_correction=True, grad_averaging=True,
            decays_inside_moment=False, uses_max_norm=False,
        ),
        2,
    ),
    "Adagrad": (AdagradRule(**_DECAYS, eps=1e-10, decoupled=False), 1),
    "LARS": (
        LarsRule(
            **_DECAYS, momentum=0.9, nesterov=False, trust_coefficient=0.001, eps=1e-8,
            uses_trust_ratio=True,
        ),
        1,
    ),
}  # fmt: skip
"""Rules with how many lists of state they have."""

PLAIN = "reference"
"""Plain torch operations, one tensor after the other; what the others are compared with."""


def back_ends(device: torch.device) -> list[str]:
    """Name those that run here, the plain one first."""
    found = [PLAIN, "blocks"]
    for name in ("jit",) if device.type == "cpu" else ("triton",):
        try:
            backend(name)
        except PreampUnavailableError:
            continue
        found.append(name)
    return found


def update(ops: Ops, name: str, case: StepCase) -> Callable[[], None]:
    """Make an update of masters from half gradients that rounds the half weights."""
    rule, count = RULES[name]
    weights = Weights(case)
    masters = [param.detach().clone() for param in weights.parameters()]
    halves = [master.to(case.half) for master in masters]
    grads = [(torch.randn_like(master) * 1e-3).to(case.half) for master in masters]
    states = [[torch.full_like(master, 1e-6) for master in masters] for _ in range(count)]
    if rule.has_numbers:
        states[-1] = [torch.ones((), device=case.device) for _ in masters]
    one = torch.ones((), device=case.device)

    def run() -> None:
        told = Update(step=10, inv_scale=one, halves=halves)
        ops.update_(masters, grads, *states, rule=rule, update=told)

    return run


def with_threads(run: Callable[[], object], threads: int) -> Callable[[], object]:
    """Run with so many threads; the others have one."""

    def running() -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            run()
        finally:
            torch.set_num_threads(before)

    return running


def kernels(case: StepCase, effort: Effort, threads: int) -> Iterator[records.Record]:
    """Measure every rule on every back end, and the fastest with several threads."""
    names, facts = back_ends(case.device), facts_of(case)
    sync = torch.cuda.synchronize if case.device.type == "cuda" else lambda: None
    for rule in RULES:
        runs: dict[str, Callable[[], object]] = {n: update(backend(n), rule, case) for n in names}
        if threads > 1:
            runs[f"{names[-1]}, {threads} threads"] = with_threads(runs[names[-1]], threads)
        source = torch.empty(min(case.parameters, 1 << 25), device=case.device)
        target = torch.empty_like(source)
        runs["copy"] = lambda s=source, t=target: t.copy_(s)
        if threads > 1:
            runs[f"copy, {threads} threads"] = with_threads(runs["copy"], threads)
        variants = [
            Variant(name=name, group=rule, seconds=stopwatch(run, synchronize=sync))
            for name, run in runs.items()
        ]
        for row in measure(variants, effort):
            yield records.measured(row, copied=source.numel(), part="kernels", **facts)


@contextmanager
def ops_left_out(device: torch.device) -> Iterator[None]:
    """Let the ops that a step of `FusedAdam` calls do nothing."""
    zero, one = torch.zeros((), device=device), torch.ones((), device=device)

    def census(*_: object, with_norm: bool = False, **__: object) -> Census:
        return Census(zero, one if with_norm else None)

    stubs: dict[str, Callable[..., object]] = {
        "update_": lambda *_, **__: None,
        "cast_copy_": lambda *_: None,
        "l2norm": lambda *_: one,
        "census": census,
    }
    own = {name: getattr(ByDevice, name) for name in stubs}
    for name, stub in stubs.items():
        setattr(ByDevice, name, stub)
    try:
        yield
    finally:
        for name, op in own.items():
            setattr(ByDevice, name, op)


def bookkeeping(level: str, case: StepCase, effort: Effort) -> list[records.Record]:
    """Measure a step without its ops, and what one pass over a column costs on this machine.

    Every row has ``each``: nanoseconds for each tensor. Of a step the time that it takes to put
    gradients in place, which the benchmark does, is taken off.
    """
    gradients = Gradients(case, case.half, case.scale)
    work = through_engine(level, fused_adam)(case, gradients)
    params: Any = list(work.weights)

    def attach() -> None:
        gradients.attach(params)
        for param in params:
            param.grad = None

    def step() -> None:
        with ops_left_out(case.device):
            work.step()

    work.step()
    column = list(params)
    passes = {
        "a pass that reads grad": lambda: list(map(attrgetter("grad"), column)),
        "a pass that reads versions": lambda: list(map(attrgetter("_version"), column)),
        "attach": attach,
        f"{level}, FusedAdam": step,
    }
    variants = [
        Variant(name=name, group=name, seconds=stopwatch(run)) for name, run in passes.items()
    ]
    rows = {row.name: row for row in measure(variants, effort)}
    taken_off = rows.pop("attach").best
    found, facts = list[records.Record](), facts_of(case)
    for name, row in rows.items():
        best = row.best - (taken_off if name.endswith("FusedAdam") else 0)
        more = {"each": best * 1e6 / case.tensors, "level": level, "part": "bookkeeping"}
        found.append(records.measured(row, **more, **facts))
    return found


def facts_of(case: StepCase) -> records.Record:
    """What is true of all rows of a case."""
    return {
        "benchmark": "parts",
        "parameters": case.parameters,
        "tensors": case.tensors,
        "half": str(case.half).removeprefix("torch."),
        "clip": case.clip,
        **records.provenance(case.device),
    }


def main() -> None:
    """Measure, print, and append rows."""
    given = asked(
        __doc__,
        sizes=("10000000/10,1000000/1000", "parameters/tensors"),
        books=("100,1000,2000", "numbers of tensors"),
        device=("cpu", "where"),
        threads=(2, "of the fastest kernels, besides one"),
        seconds=(10.0, "for each rule and level"),
        out=(RESULTS / "parts.jsonl", "file that gets the rows"),
    )
    device = torch.device(given.device)
    threads = given.threads if device.type == "cpu" else 1
    rows: list[records.Record] = []
    effort = Effort(seconds=given.seconds, most=400)
    for size in given.sizes.split(","):
        parameters, tensors = map(int, size.split("/"))
        case = StepCase(
            parameters=parameters, tensors=tensors, half=torch.bfloat16, clip=False, device=device
        )
        for row in kernels(case, effort, threads):
            rows.append(row)
            print(f"{size} {row['group']:18} {row['name']:18} {row['best']:8.3f} ms", flush=True)
    for count in map(int, given.books.split(",")):
        for level, half in (("O2", torch.float16), ("O5", torch.bfloat16)):
            case = StepCase(
                parameters=16 * count, tensors=count, half=half, clip=True, device=device
            )
            for row in bookkeeping(level, case, effort):
                rows.append(row)
                print(f"{count:5} tensors {level} {row['name']:28} {row['each']:8.0f} ns each")
    records.append(given.out, rows)


if __name__ == "__main__":
    main()
