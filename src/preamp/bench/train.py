# SPDX-License-Identifier: BSD-3-Clause
"""Whole training steps at every opt level against the same loop written by hand."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

import preamp
from preamp.bench import records
from preamp.bench.harness import Effort, Variant, compare, time_rounds
from preamp.bench.tasks import TaskConfig
from preamp.bench.worker import Job, Worker, WorkerError
from preamp.core.errors import message

AUTOCAST = "bf16 autocast by hand"
"""What O5 is to beat; in its group only."""


def check_levels(levels: list[str]) -> None:
    """Refuse levels that do not exist.

    Args:
        levels: Names.

    Raises:
        ValueError: One of them is not an opt level.
    """
    for level in levels:
        if level not in preamp.OPT_LEVELS:
            raise ValueError(
                message(
                    f"Opt level {level!r} is not known",
                    f"Choose from {', '.join(preamp.OPT_LEVELS)}",
                    "Pass for example --levels O0,O2",
                )
            )


def run_level(task: TaskConfig, level: str, effort: Effort) -> list[records.Record]:
    """Measure one opt level: the loop by hand, then preamp's.

    Every loop trains in a process of its own; their steps are interleaved.

    Args:
        task: What to train.
        level: The opt level.
        effort: How long.

    Returns:
        One record for each loop. Loops by hand that fail here have the reason.

    Raises:
        WorkerError: A loop with preamp fails.
    """
    device = torch.device(task.device)
    facts = {
        "benchmark": "train",
        "model": task.name,
        "width": task.width,
        "batch": task.batch,
        "level": level,
        **records.provenance(device),
        "threads": 1,
    }
    failed: list[records.Record] = []
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, job in _jobs(task, level).items():
            worker = stack.enter_context(Worker(job))
            try:
                worker.step()
            except WorkerError as error:
                if job.way != "by hand":
                    raise
                failed.append(records.not_measured(name, level, str(error), **facts))
            else:
                workers[name] = worker
        return [*_measure(workers, level, effort, facts), *failed]


def _jobs(task: TaskConfig, level: str) -> dict[str, Job]:
    """The loops by name, the baseline first."""
    jobs = {f"{level} by hand": Job(task=task, way="by hand", level=level)}
    if level == "O5":
        jobs[AUTOCAST] = Job(task=task, way="by hand", level="O4")
    ways = ["torch AdamW"]
    if preamp.OPT_LEVELS[level].master_weights:
        ways.append("FusedAdam")
    for way in ways:
        jobs[f"preamp {level}, {way}"] = Job(task=task, way=way, level=level)
    return jobs


def _measure(
    workers: dict[str, Worker], level: str, effort: Effort, facts: dict[str, Any]
) -> list[records.Record]:
    variants = [
        Variant(name=name, group=level, seconds=worker.step) for name, worker in workers.items()
    ]
    seconds = time_rounds(variants, effort)
    done: list[records.Record] = []
    for variant in variants:
        row = compare(variant, variants[0].name, seconds)
        more = workers[variant.name].memory()
        if AUTOCAST in seconds:
            against = compare(variant, AUTOCAST, seconds)
            more["to_autocast"] = against.best_ratio
            more["to_autocast_p20"] = against.ratio_p20
            more["to_autocast_p80"] = against.ratio_p80
        done.append(records.measured(row, **more, **facts))
    return done
