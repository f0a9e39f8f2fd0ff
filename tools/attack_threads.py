# SPDX-License-Identifier: BSD-3-Clause
"""Train in several threads at once, and look whether each gets what it gets alone, bit by bit.

    python tools/attack_threads.py --rounds 480 --seed 1

Every round draws two to four programs: a level, a scope, an optimizer, ``scale_loss`` or
``GradScaler``, what is recorded, overflows, plain work in between, and engines that are closed or
dropped and made again. Each runs alone first, then all at the same time, with a switch of threads
every few microseconds. What differs is told with its program, and the exit status is 1; else the
counts become a row in ``benchmarks/results/attacks.jsonl``.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import preamp
from attack_frame import RESULTS, asked, keep
from preamp.optimizers import FusedAdam, FusedSGD

OPTIMIZERS = (FusedAdam, FusedSGD, torch.optim.AdamW, torch.optim.SGD)
DOORS = ("scale_loss", "GradScaler", "clip", "casts off")
ENDS = ("close", "drop")


@dataclass(frozen=True, slots=True)
class Program:
    """What one thread does."""

    level: str
    scope: str
    optimizer: int
    door: str
    numerics: str
    poisoned: tuple[bool, ...]  # of its steps
    renewed: int  # before which step there is a new engine
    end: str
    seed: int

    @classmethod
    def of(cls, draw: random.Random) -> Program:
        """Draw one."""
        steps = draw.randint(3, 10)
        return cls(
            level=draw.choice(list(preamp.OPT_LEVELS)),
            scope=draw.choice(("model", "thread")),
            optimizer=draw.randrange(len(OPTIMIZERS)),
            door=draw.choice(DOORS),
            numerics=draw.choice(("off", "light", "full")),
            poisoned=tuple(draw.random() < 0.2 for _ in range(steps)),
            renewed=draw.randint(1, steps),
            end=draw.choice(ENDS),
            seed=draw.randrange(1000),
        )


def train(program: Program) -> list[torch.Tensor]:
    """Do what the program says; returns weights, the loss of each step, and a plain product."""
    random_numbers = torch.Generator().manual_seed(program.seed)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(torch.randn(param.shape, generator=random_numbers))
    optimizer = OPTIMIZERS[program.optimizer](model.parameters(), lr=2.0**-6)
    scaler = _start(program, model, optimizer)
    seen: list[torch.Tensor] = []
    for step, poisoned in enumerate(program.poisoned):
        if step == program.renewed:
            preamp.engine_of(optimizer).close()
            scaler = _start(program, model, optimizer)
        x = torch.randn(8, 6, generator=random_numbers)
        loss = model(x).float().square().mean()
        seen.append(loss.detach())
        if poisoned and program.level in ("O1", "O2"):
            loss = loss * float("inf")
        _step(program, loss, optimizer, scaler)
        optimizer.zero_grad()
    weights = [value.clone() for value in model.state_dict().values()]
    if program.end == "close":
        preamp.engine_of(optimizer).close()
    del model, optimizer, scaler, loss
    plain = torch.randn(4, 4, generator=random_numbers)
    until = time.thread_time() + 10  # of this thread alone, whatever else the machine does
    while (product := plain @ plain).dtype is not plain.dtype and time.thread_time() < until:
        gc.collect()  # does nothing while another thread collects
    return [*weights, *seen, product]


def _start(program: Program, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    preamp.initialize(
        model,
        optimizer,
        opt_level=program.level,
        scope=program.scope,
        numerics=program.numerics,
        verbosity=0,
    )
    return preamp.GradScaler(optimizer)


def _step(
    program: Program, loss: torch.Tensor, optimizer: torch.optim.Optimizer, scaler: Any
) -> None:
    if program.door == "GradScaler":
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    if program.door == "clip":
        preamp.clip_grad_norm_(optimizer, 0.5)
    if program.door == "casts off":
        with preamp.disable_casts():
            torch.ones(3, 3) @ torch.ones(3, 3)
    optimizer.step()


def same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    """Whether they are of the same dtypes and bits, but for the bits of nan."""
    return len(one) == len(other) and all(
        a.dtype is b.dtype and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(one, other, strict=True)
    )


def attack(draw: random.Random) -> tuple[int, list[str]]:
    """One round; returns how many threads it had, and what differed."""
    programs = [Program.of(draw) for _ in range(draw.randint(2, 4))]
    alone = [train(program) for program in programs]
    gate = threading.Barrier(len(programs))

    def together(program: Program) -> list[torch.Tensor]:
        gate.wait()
        return train(program)

    broken: list[str] = []
    with ThreadPoolExecutor(len(programs)) as pool:
        futures = [pool.submit(together, program) for program in programs]
    for program, expected, future in zip(programs, alone, futures, strict=True):
        error = future.exception()
        if error is not None:
            broken.append(f"{program}: {type(error).__name__}: {error}")
        elif not same(expected, future.result()):
            broken.append(f"{program}: differs from what it does alone")
    return len(programs), broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack; return the exit status."""
    given = asked(
        __doc__,
        arguments,
        rounds=(480, "how many"),
        seed=(0, "what the programs are drawn from"),
        out=(RESULTS / "attacks.jsonl", "file that gets the row"),
    )
    warnings.simplefilter("ignore")
    sys.setswitchinterval(5e-6)
    draw, threads, broken = random.Random(given.seed), 0, list[str]()
    for _ in range(given.rounds):
        count, found = attack(draw)
        threads += count
        broken += found
        print(*found, sep="\n", end="", flush=True)
    print(f"seed {given.seed}: {given.rounds} rounds, {threads} threads, {len(broken)} differed")
    if broken:
        return 1
    kinds = {"threads": {"rounds": given.rounds, "threads": threads}}
    keep(given.out, "attacks", {"seed": given.seed, "kinds": kinds})
    return 0


if __name__ == "__main__":
    sys.exit(main())
