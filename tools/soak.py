# SPDX-License-Identifier: BSD-3-Clause
"""Train a tiny model for thousands of steps with everything that can go wrong, and check the end.

    python tools/soak.py                        # 100,000 steps on one rank, 10,000 on two: hours
    python tools/soak.py --steps 500 --steps-on-two 0 --levels O2

Two models and two optimizers share three losses: one for each model and one for both. Steps
accumulate one to three backwards, some are clipped, and some backwards overflow because infinity is
put into them. What happens in a step depends on the seed and on its number only. The same training
runs three times at each level:

- *straight*: in one process, without a checkpoint;
- *reloaded*: in one process that saves at random places, also between backward and step, and goes
  on with new objects that load the file;
- *killed*: in processes that are killed at random moments, while they save as well as while they
  train, each going on from the newest checkpoint. Of several ranks all are killed or one, and then
  the others must raise.

All three must end with the same checkpoint, bitwise: weights, optimizer states, loss scales,
counters, learning rates, random states. Steps applied and skipped, and the loss scales, must be
what the injected overflows make them, as computed without torch. One of the models computes in
powers of two only, and must have the weights that float64 arithmetic gives. In the first two runs
the resident memory of each rank, and its numbers of live tensors, objects, open files and threads
must not grow after a warm-up. What passes becomes a row in ``benchmarks/results/soak.jsonl``.
"""

from __future__ import annotations

import gc
import random
import re
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from attack_frame import RESULTS, TOLD, Forks, Report, asked, keep, meet
from preamp.checkpoint import read_checkpoint
from soak_checks import check, growth
from soak_training import Memory, Options, Run, Step, train

GROUP_SECONDS = 60  # until a rank gives up on another


def start(options: Options, folder: Path, **how: bool) -> Forks:
    """Train in a fork for each rank, which report steps, saves and memory."""
    place = str(Path(tempfile.mkdtemp(dir=folder.parent), "meet"))

    def work(rank: int, report: Report) -> int:
        def tell(line: str) -> None:
            if rank == 0 or line.startswith("memory"):
                report(f"{line} {rank}")

        try:
            meet(rank, options.ranks, place, GROUP_SECONDS)
            gc.freeze()  # what is there already is none of the training's
            train(options, folder, report=tell, **how)
        except Exception as error:
            gone = "closed by peer|reset by peer|imed out"
            if options.ranks > 1 and re.search(gone, str(error)):
                return TOLD
            raise
        return 0

    return Forks(work, options.ranks)


def run_once(options: Options, folder: Path, **how: bool) -> dict[int, list[Memory]]:
    """Train in one process, or one for each rank; return the memory of each."""
    job = start(options, folder, **how)
    found: dict[int, list[Memory]] = defaultdict(list)
    for line in job.lines:
        kind, *numbers, rank = line.split()
        if kind == "memory":
            found[int(rank)].append(Memory(*map(int, numbers)))
    job.wait_after_kill(may_finish=True)
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
                job.kill(draw)
                kills += 1
                break
        job.wait_after_kill(may_finish=True)
        if Path(folder, "final.pt").exists():
            return kills, again


def soak(options: Options, folder: Path) -> dict[str, Any]:
    """Run all three and check them; return what was counted and measured."""
    folders = {name: folder / name for name in ("straight", "reloaded", "killed")}
    begin, took, memory = time.monotonic(), {}, {}
    for name in ("straight", "reloaded"):
        is_saving = name == "reloaded"
        found = run_once(options, folders[name], checkpoints=is_saving, reloads=is_saving)
        took[name], begin = time.monotonic() - begin, time.monotonic()
        memory |= {f"{name}, rank {rank}": samples for rank, samples in sorted(found.items())}
    kills, again = run_killed(options, folders["killed"])
    took["killed"] = time.monotonic() - begin
    check(options, {name: read_checkpoint(path / "final.pt") for name, path in folders.items()})
    for name, samples in memory.items():
        if grown := growth(samples):
            raise SystemExit(f"{options.level}, {name}: {grown}")
    steps = [Step.of(options.seed, number) for number in range(options.steps)]
    skipped = sum(step.skipped(model) for step in steps for model in (0, 1))
    return {
        **asdict(options),
        "applied": 2 * options.steps - skipped,
        "skipped": skipped,
        "saves": sum(bool(step.saves) for step in steps),
        "reloads": sum(bool(step.saves) and step.reloads for step in steps),
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
        "{level}, ranks: {ranks}, seed {seed}: {steps} steps, {applied} applied and {skipped} "
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
    options = Options("O0", 1, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(options, 0)
        step = replace(Step.of(0, 0), losses=(2,), poisoned=(False,))
        run.backwards(step, poisons=False)
        run.update(step)
        for name in ("one.pt", "one.safetensors"):
            run.save(Path(folder, name), None)
            run.load(Path(folder, name))
        run.engine.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Soak the given levels; return the exit status."""
    given = asked(
        __doc__,
        arguments,
        steps=(100_000, "of one process"),
        steps_on_two=(10_000, "of two ranks; 0 for none"),
        seed=(0, "what steps and kills are drawn from"),
        levels=("O1,O2,O5", "opt levels"),
        results=(RESULTS / "soak.jsonl", "file that gets the rows"),
    )
    warnings.simplefilter("ignore")
    load_everything()
    for level in given.levels.split(","):
        for ranks, steps in ((1, given.steps), (2, given.steps_on_two)):
            if not steps:
                continue
            with tempfile.TemporaryDirectory() as name:
                row = soak(Options(level, steps, given.seed, ranks), Path(name))
            print(told(row), flush=True)
            keep(given.results, "soak", [row])
    return 0


if __name__ == "__main__":
    sys.exit(main())
