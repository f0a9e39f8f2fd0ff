# SPDX-License-Identifier: BSD-3-Clause
"""Train a tiny model for thousands of steps with everything that can go wrong, and check the end.

    python tools/soak.py --steps 10000 --levels O1,O2,O5
    python tools/soak.py --steps 500 --levels O2 --ranks 2

Two models and two optimizers share three losses: one for each model and one for both. Steps
accumulate one to three backwards, some are clipped, and some backwards overflow because infinity is
put into them. What happens in a step depends on the seed and on its number only. The same training
runs three times at each level:

- *straight*: in one process, without a checkpoint;
- *reloaded*: in one process that saves at random places, also between backward and step, and goes
  on with new objects that load the file;
- *killed*: in processes that are killed at random moments, while they save as well as while they
  train, each going on from the newest checkpoint.

All three must end with the same checkpoint, bitwise: weights, optimizer states, loss scales,
counters, learning rates, random states. Steps applied and skipped, and the loss scales, must be
what the injected overflows make them, as computed without torch. One of the models computes in
powers of two only, and must have the weights that float64 arithmetic gives. In the first two runs
the resident memory and the numbers of live tensors and objects must not grow after a warm-up.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist

from preamp.checkpoint import read_checkpoint
from soak_checks import check, growth
from soak_training import Memory, Options, Run, Step, train


class Job:
    """A process for each rank, a fork of this one, and the lines that the first reports."""

    def __init__(self, options: Options, folder: Path, **how: bool) -> None:
        reading, writing = os.pipe()
        meet = Path(tempfile.mkdtemp(dir=folder.parent), "meet")
        sys.stdout.flush()
        self._pids: list[int] = []
        for rank in range(options.ranks):
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                _be_rank(options, folder, (rank, writing, meet), how)
            self._pids.append(pid)
        os.close(writing)
        self.lines = os.fdopen(reading)

    def kill(self) -> None:
        """Stop all ranks at once."""
        for pid in self._pids:
            os.kill(pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait for all ranks to end.

        Raises:
            SystemExit: One has neither finished nor been killed.
        """
        self.lines.close()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self._pids]
        if any(code not in (0, -signal.SIGKILL) for code in codes):
            raise SystemExit(f"processes ended with {codes}")


def _be_rank(
    options: Options, folder: Path, place: tuple[int, int, Path], how: dict[str, bool]
) -> NoReturn:
    rank, pipe, meet = place
    status = 1
    try:
        if options.ranks > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{meet}", rank=rank, world_size=options.ranks
            )
        gc.freeze()  # what is there already is none of the training's

        def report(line: str) -> None:
            if rank == 0:
                os.write(pipe, f"{line}\n".encode())

        train(options, folder, report=report, **how)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def run_once(options: Options, folder: Path, **how: bool) -> list[Memory]:
    """Train in one process, or one for each rank; return the first one's memory."""
    job = Job(options, folder, **how)
    lines = [line.split() for line in job.lines]
    job.wait()
    return [Memory(*map(int, words[1:])) for words in lines if words[0] == "memory"]


def run_killed(options: Options, folder: Path) -> tuple[int, int]:
    """Train in processes that are killed; return how many times, and the steps taken again."""
    draw = random.Random(options.seed)
    kills, again, furthest = 0, 0, -1
    # Lives longer than the way from one save to the next come to an end some day.
    saves = [n for n in range(options.steps) if Step.of(options.seed, n).saves]
    ways = [b - a for a, b in zip([0, *saves], [*saves, options.steps], strict=True)]
    longest = max(ways) + 20
    while True:
        job = Job(options, folder, checkpoints=True, reloads=False)
        life, at_saving = draw.randrange(longest), draw.random() < 0.5
        for line in job.lines:
            if line.startswith("step"):
                number = int(line.split()[1])
                again += number <= furthest
                furthest = max(furthest, number)
                life -= 1
            if life < 0 and (line == "saving\n" or not at_saving):
                time.sleep(draw.uniform(0, 0.005))  # into whatever it does then
                job.kill()
                kills += 1
                break
        job.wait()
        if Path(folder, "final.pt").exists():
            return kills, again


def soak(options: Options, folder: Path) -> str:
    """Run all three and check them; return what was measured."""
    folders = {name: folder / name for name in ("straight", "reloaded", "killed")}
    begin, took, samples = time.monotonic(), {}, {}
    for name in ("straight", "reloaded"):
        is_saving = name == "reloaded"
        samples[name] = run_once(options, folders[name], checkpoints=is_saving, reloads=is_saving)
        took[name], begin = time.monotonic() - begin, time.monotonic()
    kills, again = run_killed(options, folders["killed"])
    took["killed"] = time.monotonic() - begin
    contents = {name: read_checkpoint(path / "final.pt") for name, path in folders.items()}
    check(options, contents)
    for name, found in samples.items():
        if grown := growth(found):
            raise SystemExit(f"{options.level}, {name}: {grown}")
    steps = [Step.of(options.seed, number) for number in range(options.steps)]
    saves = sum(bool(step.saves) for step in steps)
    reloads = sum(bool(step.saves) and step.reloads for step in steps)
    skipped = sum(step.skipped(model) for step in steps for model in (0, 1))
    lines = [
        f"{options.level}: {options.steps} steps, {2 * options.steps - skipped} applied and "
        f"{skipped} skipped by the two optimizers; {saves} saves, {reloads} reloads; "
        f"{kills} kills, {again} steps taken again; all ends are equal",
        "  seconds: " + ", ".join(f"{name} {time:.1f}" for name, time in took.items()),
    ]
    for name, found in samples.items():
        for sample in (found[len(found) // 4], found[-1]) if found else ():
            lines.append(
                f"  {name}, after {sample.step} steps: {sample.rss / 2**20:.1f} MiB resident, "
                f"{sample.tensors} tensors, {sample.objects} objects"
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--levels", default="O1,O2,O5", help="opt levels")
    parser.add_argument("--ranks", type=int, default=1, help="processes that train together")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    load_everything()
    for level in given.levels.split(","):
        options = Options(level, given.steps, given.seed, given.ranks)
        with tempfile.TemporaryDirectory() as name:
            print(soak(options, Path(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
