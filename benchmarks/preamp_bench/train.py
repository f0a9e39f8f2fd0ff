# SPDX-License-Identifier: BSD-3-Clause
"""Whole training steps at every opt level against the same loop written by hand."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch

import preamp
from preamp_bench import records
from preamp_bench.harness import Effort, Variant, compare, time_rounds
from preamp_bench.tasks import TaskConfig
from preamp_bench.worker import Job, Worker, WorkerError

AUTOCAST = "bf16 autocast by hand"
"""What O5 is to beat; on CPUs it computes less in float32 than O4 does."""

LAUNCHES = 3
"""How often all processes are started anew.

Two processes with the very same loop differ by some percent, depending on the memory that they
happened to get; the best of several starts does not depend on the luck of one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launch:
    """What one start of all processes brought."""

    variants: list[Variant]
    seconds: dict[str, list[float]]
    memory: dict[str, dict[str, Any]]
    failed: dict[str, str]


def run_level(task: TaskConfig, level: str, effort: Effort) -> list[records.Record]:
    """Measure one opt level: the loop by hand, then preamp's.

    Every loop trains in a process of its own; their steps are interleaved.

    Raises:
        WorkerError: A loop with preamp fails.
    """
    facts = {
        "benchmark": "train",
        "model": task.name,
        "width": task.width,
        "batch": task.batch,
        "level": level,
        "launches": LAUNCHES,
        **records.provenance(torch.device(task.device)),
        "threads": 1,
    }
    part = replace(effort, seconds=effort.seconds / LAUNCHES, least=2)
    launches = [_launch(_jobs(task, level), level, part) for _ in range(LAUNCHES)]
    variants, failed = launches[-1].variants, launches[-1].failed
    names = [variant.name for variant in variants]
    seconds = {name: [s for launch in launches for s in launch.seconds[name]] for name in names}
    done: list[records.Record] = []
    for variant in variants:
        more = launches[-1].memory[variant.name]
        if AUTOCAST in seconds:
            against = compare(variant, AUTOCAST, seconds)
            more["to_autocast"] = against.best_ratio
            more["to_autocast_p20"] = against.ratio_p20
            more["to_autocast_p80"] = against.ratio_p80
        row = compare(variant, names[0], seconds)
        done.append(records.measured(row, **more, **facts))
    return [*done, *(records.not_measured(name, level, failed[name], **facts) for name in failed)]


def _jobs(task: TaskConfig, level: str) -> dict[str, Job]:
    """The loops by name, the baseline first."""
    jobs = {f"{level} by hand": Job(task=task, way="by hand", level=level)}
    if level in ("O4", "O5"):
        jobs[AUTOCAST] = Job(task=task, way="autocast", level=level)
    ways = ["torch AdamW"]
    if preamp.OPT_LEVELS[level].master_weights:
        ways.append("FusedAdam")
    for way in ways:
        jobs[f"preamp {level}, {way}"] = Job(task=task, way=way, level=level)
    return jobs


def _launch(jobs: dict[str, Job], level: str, effort: Effort) -> _Launch:
    """Start a process for each job and let their steps take turns."""
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, job in jobs.items():
            worker = stack.enter_context(Worker(job))
            try:
                worker.step()
            except WorkerError as error:
                if job.way != "by hand":
                    raise
                failed[name] = str(error)
            else:
                workers[name] = worker
        variants = [
            Variant(name=name, group=level, seconds=worker.step) for name, worker in workers.items()
        ]
        seconds = time_rounds(variants, effort)
        memory = {name: worker.memory() for name, worker in workers.items()}
    return _Launch(variants=variants, seconds=seconds, memory=memory, failed=failed)
