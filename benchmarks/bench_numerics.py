# SPDX-License-Identifier: BSD-3-Clause
"""What statistics and tracing cost a training step of the demo's GPT.

One engine trains all variants, so that all have the same memory: from step to step only what is
recorded changes. A step is forward, backward, clipping and AdamW. Next to the time of whole steps,
which the machine's moods move by more than the difference, the time inside the recorder is
measured by itself.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import torch

import preamp
from preamp.engine.recording import Recording
from preamp.numerics.records import OfModules
from preamp.watch.recorder import Recorder
from preamp_bench import records
from preamp_bench.harness import Effort, Variant, compare, stopwatch, time_rounds
from preamp_bench.loops import fused_adam
from preamp_bench.options import RESULTS, asked
from preamp_bench.tasks import Task, TaskConfig, make_task

INTERVAL = 100  # the default of numerics_every
NEVER = 1 << 60
EVENTS = (
    "_block_begins",
    "_gradients_made",
    "norm_taken",
    "update_begins",
    "step_called",
    "step_settled",
)
WAYS = {
    "off": Recording(),
    "light, between": Recording(numerics="light", every=NEVER),
    "light, measuring": Recording(numerics="light", every=1),
    "full, between": Recording(numerics="full", every=NEVER),
    "full, measuring": Recording(numerics="full", every=1),
    "modules": Recording(numerics="light", every=NEVER),
    "trace": Recording(),
}


@contextmanager
def watching(engine: preamp.Engine, way: str) -> Generator[None]:
    """Have modules watched in the variants that do so."""
    if way == "modules":
        stop = engine.watch_activations(kinds=get_args(OfModules), steps=range(1, NEVER))
        yield
        stop()
    elif way == "trace":
        engine.tracer.arm()
        yield
        engine.tracer.disarm()
    else:
        yield


class Inside:
    """Adds up the time that the recorder's methods take, calls of one another counted once."""

    def __init__(self) -> None:
        """Start at zero."""
        self.seconds = 0.0
        self._depth = 0

    def watch(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``method``."""

        @wraps(method)
        def timed(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            start = perf_counter()
            try:
                return method(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += perf_counter() - start

        return timed


class Training:
    """One engine, and steps that record this or that."""

    def __init__(self, task: Task, level: str, path: Path, inside: Inside) -> None:
        """Initialize; nothing is recorded yet but the run."""
        self.task, self.inside = task, inside
        self.own: dict[str, list[float]] = {name: [] for name in WAYS}
        optimizer = fused_adam(task.model.parameters())
        self.model, self.optimizer = preamp.initialize(
            task.model, optimizer, opt_level=level, verbosity=0, history=path
        )
        self.engine = preamp.engine_of(self.model)

    def variant(self, name: str) -> Variant:
        """Make a step that records as ``name`` says."""
        seconds = stopwatch(self._step)

        def run() -> float:
            self.engine.recorder.recording = replace(WAYS[name])
            self.inside.seconds = 0.0
            with watching(self.engine, name):
                taken = seconds()
            self.own[name].append(self.inside.seconds)
            return taken

        return Variant(name=name, group="numerics", seconds=run)

    def _step(self) -> None:
        loss = self.task.loss(self.model(self.task.inputs).float())
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(self.optimizer, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def amortised(costs: dict[str, float], way: str) -> float:
    """Mean cost of a step where one in `INTERVAL` is measured."""
    measuring, between = costs[f"{way}, measuring"], costs[f"{way}, between"]
    return (measuring + (INTERVAL - 1) * between) / INTERVAL


def measure(level: str, config: TaskConfig, effort: Effort, inside: Inside) -> list[records.Record]:
    """Measure one level."""
    with tempfile.TemporaryDirectory() as folder:
        training = Training(make_task(config), level, Path(folder) / "run.jsonl", inside)
        variants = [training.variant(name) for name in WAYS]
        seconds = time_rounds(variants, effort)
        training.engine.close()
    own = {
        name: 1e3 * statistics.median(times[effort.warmup :])
        for name, times in training.own.items()
    }
    best = {name: 1e3 * min(times) for name, times in seconds.items()}
    shortest = min(best.values())
    facts = {
        "benchmark": "numerics",
        "model": config.name,
        "width": config.width,
        "batch": config.batch,
        "level": level,
        "interval": INTERVAL,
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "tensors": sum(1 for _ in training.model.parameters()),
        **records.provenance(torch.device("cpu")),
    }
    rows = list[records.Record]()
    for variant in variants:
        way = variant.name.partition(",")[0]
        more: dict[str, object] = {"inside": own[variant.name]}
        if variant.name.endswith("measuring"):
            more["overhead"] = (amortised(own, way) - own["off"]) / shortest
            more["overhead_of_whole_steps"] = amortised(best, way) / best["off"] - 1
        rows.append(records.measured(compare(variant, "off", seconds), **more, **facts))
    return rows


def main() -> None:
    """Measure, print, and append rows."""
    given = asked(
        __doc__,
        levels=("O2,O4,O5", "opt levels"),
        width=(256, "size of the model"),
        batch=(8, "windows of text in a step"),
        seconds=(60.0, "for each level"),
        out=(RESULTS / "numerics.jsonl", "file that gets the rows"),
    )
    inside = Inside()
    for name in EVENTS:
        setattr(Recorder, name, inside.watch(getattr(Recorder, name)))
    config = TaskConfig(name="gpt", width=given.width, batch=given.batch)
    effort = Effort(seconds=given.seconds, most=1000, warmup=3)
    for level in given.levels.split(","):
        rows = measure(level, config, effort, inside)
        records.append(given.out, rows)
        for row in rows:
            print(
                f"{level} {row['name']:18} step {row['best']:8.2f} ms"
                f"  recorder {row['inside']:7.3f} ms"
                + (f"  overhead {row['overhead']:.3%}" if "overhead" in row else "")
            )


if __name__ == "__main__":
    main()
