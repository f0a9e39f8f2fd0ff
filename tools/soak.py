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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp
from preamp.checkpoint import latest_checkpoint, read_checkpoint
from preamp.checkpoint.codec import encode
from preamp.numerics.records import OverflowRecord
from preamp.optimizers import FusedAdam
from preamp.scaling import DynamicScale

BLOCKS = ((2,), (0, 1), (1, 0), (2, 2), (0, 1, 2), (2, 1, 0), (0, 0, 1), (1, 0, 1))
"""Which losses a step has, in their order: 0 is the net's, 1 the lattice's, 2 both models'."""

MEMBERS = ((0,), (1,), (0, 1))
POISONED = 0.02  # of the backwards
SCALE = DynamicScale(init_scale=2.0**8, growth_interval=16, min_scale=1.0, max_scale=2.0**8)
SIZE, UNIT, MAX_NORM = 16, 16.0, 16.0  # the lattice's gradient has a norm of 64
SAVED, RELOADED = 0.05, 0.025  # of the steps
WARM_UP_STEPS = 2000  # what is bounded has filled by then
FROZEN_AT = 20
RECORD_OBJECTS = 4  # of a skipped step: the record and three lists
RSS_SLACK, OBJECT_SLACK = 2 << 20, 400


@dataclass(frozen=True, slots=True)
class Step:
    """What happens in a step.

    Attributes:
        losses: Of its backwards.
        poisoned: Which of them overflow.
        signs: Of the lattice's inputs, one for each element and one for each backward.
        clips: Whether the optimizers clip.
        saves: Where it saves: ``""``, ``"middle"`` (before the optimizers step) or ``"end"``.
        reloads: Whether new objects then load the file.
        in_background: How it saves.
    """

    losses: tuple[int, ...]
    poisoned: tuple[bool, ...]
    signs: tuple[list[float], tuple[float, ...]]
    clips: tuple[bool, bool]
    saves: str
    reloads: bool
    in_background: bool

    @classmethod
    def of(cls, seed: int, number: int) -> Step:
        """The step with this number."""
        draw = random.Random(seed << 32 | number)
        losses = draw.choice(BLOCKS)
        return cls(
            losses=losses,
            poisoned=tuple(draw.random() < POISONED for _ in losses),
            signs=(draw.choices((-1.0, 1.0), k=SIZE), tuple(draw.choices((-1.0, 1.0), k=3))),
            clips=(draw.random() < 0.5, draw.random() < 0.5),
            saves=draw.choice(("middle", "end")) if draw.random() < SAVED else "",
            reloads=draw.random() < RELOADED / SAVED,
            in_background=draw.random() < 0.5,
        )

    def skipped(self, model: int) -> bool:
        """Whether the optimizer of ``model`` skips it."""
        backwards = zip(self.losses, self.poisoned, strict=True)
        return any(poisoned and model in MEMBERS[loss] for loss, poisoned in backwards)


class Lattice(nn.Module):
    """Its gradient is what goes in, so that sums of powers of two stay exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE) + torch.arange(SIZE) / 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return each element times its input."""
        return self.weight * x


def lattice_lr(level: str) -> float:
    """A learning rate whose updates of the lattice are exact; far below what float16 resolves."""
    return 2.0**-10 if level == "O3" else 2.0**-20


@dataclass(frozen=True, slots=True)
class Options:
    """What is run.

    Attributes:
        level: The opt level.
        steps: How many.
        seed: Of everything.
        ranks: Processes that train together.
    """

    level: str
    steps: int
    seed: int
    ranks: int


class Run:
    """The objects of a training script."""

    def __init__(self, options: Options, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        net = nn.Sequential(
            nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.25), nn.Linear(12, 1)
        )
        self.models: list[nn.Module] = [net, Lattice()]
        self.optimizers: list[torch.optim.Optimizer] = [
            FusedAdam(net.parameters(), lr=0.01, eps=1e-4),
            torch.optim.SGD(self.models[1].parameters(), lr=lattice_lr(options.level)),
        ]
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
            self.optimizers[0], T_0=50
        )
        preamp.initialize(
            self.models,
            self.optimizers,
            opt_level=options.level,
            loss_scale="dynamic",
            num_losses=len(MEMBERS),
            min_loss_scale=SCALE.min_scale,
            max_loss_scale=SCALE.max_scale,
            verbosity=0,
        )
        self.engine = preamp.engine_of(self.models[0])
        for scaler in self.engine.scalers:
            scaler.rule = SCALE
        self.wrapped = self.models
        if options.ranks > 1:
            self.wrapped = [
                DistributedDataParallel(model, broadcast_buffers=False) for model in self.models
            ]

    def backwards(self, step: Step, *, poisons: bool) -> None:
        """Fill the gradients."""
        signs = torch.tensor(step.signs[0])
        for block, loss_id in enumerate(step.losses):
            parts: list[torch.Tensor] = []
            if 0 in MEMBERS[loss_id]:
                x = torch.randn(4, 8) + random.random()
                parts.append((self.wrapped[0](x).float().sum(1) - x.sum(1)).square().mean())
            if 1 in MEMBERS[loss_id]:
                parts.append(self.wrapped[1](signs * (UNIT * step.signs[1][block])).float().sum())
            optimizers = [self.optimizers[model] for model in MEMBERS[loss_id]]
            with preamp.scale_loss(sum(parts), optimizers, loss_id=loss_id) as scaled:
                poison = float("inf") if step.poisoned[block] and poisons else 1.0
                (scaled * poison).backward()

    def update(self, step: Step) -> None:
        """Let the optimizers step."""
        for optimizer, clips in zip(self.optimizers, step.clips, strict=True):
            if clips:
                preamp.clip_grad_norm_(optimizer, MAX_NORM)
            optimizer.step()
            if optimizer is self.optimizers[0]:
                preamp.step_scheduler(self.scheduler, optimizer)
            optimizer.zero_grad()

    def save(self, path: Path, extra: Any, **options: Any) -> None:
        """Save all of it."""
        preamp.save_checkpoint(path, self.models, self.optimizers, self.scheduler, extra, **options)

    def load(self, path: Path) -> Any:
        """Load all of it; return ``extra``."""
        return preamp.load_checkpoint(path, self.models, self.optimizers, self.scheduler)


@dataclass(frozen=True, slots=True)
class Memory:
    """What a process holds at some step."""

    step: int
    rss: int
    tensors: int
    objects: int

    @classmethod
    def now(cls, step: int, run: Run) -> Memory:
        """Count after a collection, without what was there before ``gc.freeze``.

        An engine keeps the records of its latest 100,000 skipped steps, which are left out, too.
        """
        gc.collect()
        found = gc.get_objects()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        tensors = sum(issubclass(type(one), torch.Tensor) for one in found)
        kept = RECORD_OBJECTS * len(run.engine.history.of(OverflowRecord))
        return cls(step, pages * os.sysconf("SC_PAGE_SIZE"), tensors, len(found) - kept)


def train(
    options: Options,
    folder: Path,
    *,
    checkpoints: bool,
    reloads: bool,
    report: Callable[[str], object],
) -> None:
    """Train to the end, from the newest checkpoint in ``folder`` if there is one."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    run = Run(options, options.seed + rank)
    first, is_halfway = 0, False
    newest = latest_checkpoint(folder) if checkpoints else None
    if newest is not None:
        first, is_halfway = run.load(newest)
    every = max(options.steps // 30, 1)
    for number in range(first, options.steps):
        step = Step.of(options.seed, number)
        if not is_halfway:
            run.backwards(step, poisons=number % options.ranks == rank)
            if step.saves == "middle" and checkpoints:
                run = _saved(run, options, folder, (number, True), step, reloads, report)
        is_halfway = False
        run.update(step)
        if step.saves == "end" and checkpoints:
            run = _saved(run, options, folder, (number + 1, False), step, reloads, report)
        report(f"step {number}")
        if number == FROZEN_AT and gc.get_freeze_count():  # in a process of our own
            gc.collect()
            gc.freeze()  # what is there now is not counted, nor walked again and again
        if number % every == every - 1 and Path("/proc/self/statm").exists():
            now = Memory.now(number + 1, run)
            report(f"memory {now.step} {now.rss} {now.tensors} {now.objects}")
    run.save(folder / "final.pt", None)


def _saved(
    run: Run,
    options: Options,
    folder: Path,
    place: tuple[int, bool],
    step: Step,
    reloads: bool,
    report: Callable[[str], object],
) -> Run:
    """Save, and return what to go on with."""
    suffix = (".pt", ".safetensors")[place[0] % 2]
    path = folder / f"step_{place[0]}{suffix}"
    report("saving")
    run.save(path, place, keep_last=2, asynchronous=step.in_background)
    if not (reloads and step.reloads):
        return run
    run.engine.close()
    run = Run(options, seed=-1)
    if run.load(path) != place:
        raise SystemExit(f"{path} has another place than {place}")
    return run


# -- processes ---------------------------------------------------------------------------------


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


# -- what must have come out -------------------------------------------------------------------


def expected_counters(options: Options) -> dict[str, Any]:
    """What `preamp.engine.Engine.state_dict` must return, computed without torch."""
    scales, clean = [SCALE.init_scale] * len(MEMBERS), [0] * len(MEMBERS)
    steps = [{"applied": 0, "skipped": 0, "skips_in_row": 0} for _ in range(2)]
    for number in range(options.steps):
        step = Step.of(options.seed, number)
        for loss, poisoned in zip(step.losses, step.poisoned, strict=True):
            clean[loss] = 0 if poisoned else clean[loss] + 1
            if poisoned:
                scales[loss] = max(scales[loss] / 2, 1.0)
            elif clean[loss] == SCALE.growth_interval:
                scales[loss], clean[loss] = min(scales[loss] * 2, SCALE.max_scale), 0
        for model, counts in enumerate(steps):
            is_skipped = step.skipped(model)
            counts["skipped" if is_skipped else "applied"] += 1
            counts["skips_in_row"] = counts["skips_in_row"] + 1 if is_skipped else 0
    found: dict[str, Any] = {
        f"loss_scaler{loss}": {"loss_scale": scales[loss], "unskipped": clean[loss]}
        for loss in range(len(MEMBERS))
    }
    return {**found, "steps": steps}


def expected_lattice(options: Options) -> torch.Tensor:
    """The lattice's weights, by plain torch: in float64, at O3 in its float16."""
    dtype = torch.float16 if options.level == "O3" else torch.float64
    weight = nn.Parameter(Lattice().weight.detach().to(dtype))
    optimizer = torch.optim.SGD([weight], lr=lattice_lr(options.level))
    for number in range(options.steps):
        step = Step.of(options.seed, number)
        if step.skipped(1):
            continue
        backwards = zip(step.losses, step.signs[1], strict=False)
        total = UNIT * sum(sign for loss, sign in backwards if 1 in MEMBERS[loss])
        norm = abs(total) * SIZE**0.5
        clip = MAX_NORM / norm if step.clips[1] and norm > MAX_NORM else 1.0
        weight.grad = (torch.tensor(step.signs[0], dtype=torch.float64) * total * clip).to(dtype)
        optimizer.step()
    return weight.detach()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not bitwise the same in two contents."""
    (tree, tensors), (other_tree, others) = encode(one), encode(other)
    names = [] if tree == other_tree else ["numbers"]
    for name in tensors.keys() | others.keys():
        pair = tensors.get(name), others.get(name)
        if pair[0] is None or pair[1] is None or not torch.equal(*pair):
            names.append(name)
    return sorted(names)


def growth(samples: list[Memory]) -> str | None:
    """What has grown since the warm-up, if that can be told."""
    flat = [sample for sample in samples if sample.step >= WARM_UP_STEPS]
    if len(flat) < 9:
        return None
    third = len(flat) // 3
    for what, slack in (("rss", RSS_SLACK), ("tensors", 0), ("objects", OBJECT_SLACK)):
        early, late = (
            sorted(getattr(sample, what) for sample in part)[third // 2]
            for part in (flat[:third], flat[-third:])
        )
        if late > early + slack:
            return f"{what} grew from {early:,} to {late:,}"
    return None


def check(options: Options, contents: dict[str, dict[str, Any]]) -> None:
    """Compare the ends of all runs with each other and with what they must be.

    Raises:
        SystemExit: One is different.
    """
    straight = contents["straight"]
    for name, content in contents.items():
        if names := differences(straight, content):
            raise SystemExit(f"{options.level}, {name}: other than straight in {names[:5]}")
    found, wanted = straight["engines"][0]["scalers"], expected_counters(options)
    if found != wanted:
        raise SystemExit(f"{options.level}: counters are {found}, and should be {wanted}")
    weight = straight["models"][1]["state"]["weight"]
    if not torch.equal(weight.double(), expected_lattice(options).double()):
        raise SystemExit(f"{options.level}: the lattice's weights are not what they should be")


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
