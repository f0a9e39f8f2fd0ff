# SPDX-License-Identifier: BSD-3-Clause
"""Train a tiny model for thousands of steps with everything that can go wrong, and check the end.

    python tools/soak.py                        # 100,000 steps at each level: hours
    python tools/soak.py --steps 500 --levels O2

Two models and two optimizers share three losses: one for each model and one for both. Steps
accumulate one to three backwards, some are clipped, and some backwards overflow because infinity is
put into them. What happens in a step depends on the seed and on its number only. The same training
runs three times at each level:

- *straight*: in one process, without a checkpoint;
- *reloaded*: in one process that saves after random steps, and goes on with new objects that load
  the file;
- *killed*: in processes that are killed at random moments, while they save as well as while they
  train, each going on from the newest checkpoint.

All three must end with the same checkpoint, bitwise: weights, optimizer states, loss scales,
counters, learning rates, random states. Steps applied and skipped, and the loss scales, must be
what the injected overflows make them, as computed without torch. One of the models computes in
powers of two only, and must have the weights that float64 arithmetic gives. In the first two runs
the resident memory of the process, and its numbers of live tensors, objects, open files and threads
must not grow after a warm-up. What passes becomes a row in ``benchmarks/results/soak.jsonl``.
"""

from __future__ import annotations

import gc
import random
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attack_frame import RESULTS, Forks, Report, asked, keep
from preamp.checkpoint import read_checkpoint
from soak_checks import check, growth
from soak_training import FINAL, Memory, Options, Run, Step, train


def start(options: Options, folder: Path, **how: bool) -> Forks:
    """Train in a fork, which reports steps, saves and memory."""

    def work(_: int, report: Report) -> None:
        gc.freeze()  # what is there already is none of the training's
        train(options, folder, report=report, **how)

    return Forks(work)


def end(job: Forks, *allowed: int) -> None:
    """Wait for a training to end, with one of these statuses."""
    _, (code,) = job.wait()
    if code not in allowed:
        raise SystemExit(f"the process ended with {code}")


def run_once(options: Options, folder: Path, **how: bool) -> list[Memory]:
    """Train in one process; return its memory."""
    job = start(options, folder, **how)
    lines = (line.split() for line in job.lines if line.startswith("memory"))
    found = [Memory(*map(int, numbers)) for _, *numbers in lines]
    end(job, 0)
    return found


def run_killed(options: Options, folder: Path) -> tuple[int, int]:
    """Train in processes that are killed; return how many times, and the steps taken again."""
    draw = random.Random(options.seed)
    kills, again, furthest = 0, 0, -1
    # Lives longer than the way from one save to the next come to an end some day.
    saves = [n for n in range(options.steps) if Step.of(options.seed, n).saves]
    ways = [b - a for a, b in zip([0, *saves], [*saves, options.steps], strict=True)]
    longest = max(ways) + 20
    while True:
        job = start(options, folder, checkpoints=True, reloads=False)
        life, at_saving = draw.randrange(longest), draw.random() < 0.5
        for line in job.lines:
            if line.startswith("step"):
                number = int(line.split()[1])
                again += number <= furthest
                furthest = max(furthest, number)
                life -= 1
            if life < 0 and (line.startswith("saving") or not at_saving):
                time.sleep(draw.uniform(0, 0.005))  # into whatever it does then
                job.kill()
                kills += 1
                break
        end(job, 0, -signal.SIGKILL)
        if (folder / FINAL).exists():
            return kills, again


def soak(options: Options, folder: Path) -> dict[str, Any]:
    """Run all three and check them; return what was counted and measured."""
    folders = {name: folder / name for name in ("straight", "reloaded", "killed")}
    begin, took, memory = time.monotonic(), {}, {}
    for name in ("straight", "reloaded"):
        is_saving = name == "reloaded"
        memory[name] = run_once(options, folders[name], checkpoints=is_saving, reloads=is_saving)
        took[name], begin = time.monotonic() - begin, time.monotonic()
    kills, again = run_killed(options, folders["killed"])
    took["killed"] = time.monotonic() - begin
    check(options, {name: read_checkpoint(path / FINAL) for name, path in folders.items()})
    for name, samples in memory.items():
        if grown := growth(samples):
            raise SystemExit(f"{options.level}, {name}: {grown}")
    steps = [Step.of(options.seed, number) for number in range(options.steps)]
    skipped = sum(step.skipped(model) for step in steps for model in (0, 1))
    return {
        **asdict(options),
        "applied": 2 * options.steps - skipped,
        "skipped": skipped,
        "saves": sum(step.saves for step in steps),
        "reloads": sum(step.saves and step.reloads for step in steps),
        "kills": kills,
        "again": again,
        "seconds": {name: round(seconds, 1) for name, seconds in took.items()},
        "memory": {
            name: [asdict(sample) for sample in (found[len(found) // 4], found[-1])]
            for name, found in memory.items()
        },
    }


def told(row: dict[str, Any]) -> str:
    """Return a row in words."""
    lines = [
        "{level}, seed {seed}: {steps} steps, {applied} applied and {skipped} "
        "skipped by the two optimizers; {saves} saves, {reloads} reloads; {kills} kills, {again} "
        "steps taken again; all ends are equal".format(**row),
        "  seconds: " + ", ".join(f"{name} {time}" for name, time in row["seconds"].items()),
    ]
    for name, samples in row["memory"].items():
        for sample in samples:
            lines.append(
                f"  {name}, after {sample['step']} steps: {sample['rss'] / 2**20:.1f} MiB "
                "resident, {tensors} tensors, {objects} objects, {files} open files, {threads} "
                "threads".format(**sample)
            )
    return "\n".join(lines)


def load_everything() -> None:
    """Do a bit of it all, so that the forks of this process need not import anything."""
    options = Options("O0", 1, 0)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, 0)
        step = replace(Step.of(0, 0), losses=(2,), poisoned=(False,))
        run.backwards(step)
        run.update(step)
        run.save(Path(folder, FINAL), None)
        run.load(Path(folder, FINAL))
        run.engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak the given levels; return the exit status."""
    given = asked(
        __doc__,
        arguments,
        steps=(100_000, "at each level"),
        seed=(0, "what steps and kills are drawn from"),
        levels=("O1,O2,O5", "opt levels"),
        results=(RESULTS / "soak.jsonl", "file that gets the rows"),
    )
    warnings.simplefilter("ignore")
    load_everything()
    for level in given.levels.split(","):
        with tempfile.TemporaryDirectory() as name:
            row = soak(Options(level, given.steps, given.seed), Path(name))
        print(told(row), flush=True)
        keep(given.results, "soak", row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
