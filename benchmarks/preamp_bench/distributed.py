# SPDX-License-Identifier: BSD-3-Clause
"""What preamp adds to a step on several ranks, next to plain DDP's and plain FSDP2's step.

All ranks run on this machine, joined by gloo, a thread each. Under DDP preamp calls no collective
of its own in a step; where ranks hold parts of the parameters, as under FSDP2, they tell each other
of overflow by one all-reduce of 16 bytes. On more ranks a tree of two-rank messages takes
``t(n) = t(2) * log2(n)``, with ``t(2)`` as measured here.
"""

# torch leaves backward() and step() untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import preamp
from preamp.core.errors import message
from preamp.distributed import shard_optimizer
from preamp.distributed.groups import collectives, shard_fully
from preamp_bench import records
from preamp_bench.harness import Effort, Variant, measure, stopwatch

RANKS = 2
WORLDS = (8, 64, 1024)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train."""

    group: str  # what it is compared with: the first of its group
    level: str | None = None  # the opt level; ``None`` for plain torch
    is_shared: bool = False  # whether ranks share optimizer state and masters


WAYS: Mapping[str, Way] = MappingProxyType(
    {
        "plain DDP": Way("DDP"),
        "preamp O0": Way("DDP", "O0"),
        "preamp O5": Way("DDP", "O5"),
        "preamp O5, ZeRO-1": Way("DDP", "O5", is_shared=True),
        "plain FSDP2": Way("FSDP2"),
        "preamp O0, FSDP2": Way("FSDP2", "O0"),
        "preamp O5, FSDP2": Way("FSDP2", "O5"),
    }
)
COLLECTIVES: Mapping[str, int] = MappingProxyType(
    {"all-reduce, 16 bytes": 4, "all-reduce, 4 KiB": 1024}
)
"""Their sizes in float32. The first is what preamp adds to a step under FSDP2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is measured."""

    width: int = 512  # of the model's four linear layers
    # How often each step is timed; as often on every rank, since each is a matter of all.
    rounds: int = 30

    def __post_init__(self) -> None:
        """Refuse what cannot be measured."""
        if self.width < 1 or self.rounds < 2:
            raise ValueError(
                message(
                    f"Got width={self.width} and rounds={self.rounds}",
                    "The width is at least 1, and there are two rounds or more",
                    "Pass for example --width 512 --rounds 30",
                )
            )


def make_step(way: Way, width: int) -> Callable[[], None]:
    """Make a function that takes a whole training step: forward, backward, clipping, AdamW."""
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(4)]
    model: Any = nn.Sequential(*layers)
    if way.group == "FSDP2":
        shard_fully(model, nn.ModuleList(layers))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if way.level is not None:
        preamp.initialize(model, optimizer, opt_level=way.level, loss_scale="dynamic", verbosity=0)
    wrapped = DistributedDataParallel(model) if way.group == "DDP" else model
    if way.is_shared:
        shard_optimizer(optimizer)
    batch = torch.randn(16, width)

    def step() -> None:
        loss = cast("torch.Tensor", wrapped(batch)).float().square().mean()
        if way.level is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(config: Config) -> list[records.Record]:
    """Start the ranks and measure, every variant once a round; returns what the first rank saw."""
    with tempfile.TemporaryDirectory() as folder:
        # Forks of a server end without finalizing Python. Spawned ones finalize, and may abort as
        # gloo's threads take Python's lock to free the last tensors (pytorch/pytorch#190489).
        start = cast("Any", multiprocessing).start_processes
        start(_rank_main, (folder, config), RANKS, start_method="forkserver")
        rows = records.read(Path(folder, "rows.jsonl"))
    where = {"benchmark": "distributed", "ranks": RANKS, "width": config.width}
    where |= {"parameters": 4 * config.width * (config.width + 1)}
    where |= records.provenance(torch.device("cpu")) | {"threads": 1}
    return [row | where for row in rows]


def _rank_main(rank: int, folder: str, config: Config) -> None:
    """Measure on one rank; the first one writes the rows down."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    collectives.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)

    def variant(name: str, group: str, work: Callable[[], Any]) -> Variant:
        return Variant(name=name, group=group, seconds=stopwatch(work))

    variants = [
        variant(name, way.group, make_step(way, config.width)) for name, way in WAYS.items()
    ]
    for name, elements in COLLECTIVES.items():
        vector = torch.zeros(elements)
        variants.append(variant(name, name, lambda vector=vector: collectives.all_reduce(vector)))
    effort = Effort(seconds=0.0, least=config.rounds, most=config.rounds, warmup=3)
    rows = measure(variants, effort)
    if rank == 0:
        records.append(Path(folder, "rows.jsonl"), [records.measured(row) for row in rows])
    collectives.destroy_process_group()


def derived(row: records.Record) -> dict[int, float]:
    """Milliseconds that a two-rank all-reduce would take on more ranks, from its best time."""
    return {world: row["best"] * math.log2(world) for world in WORLDS}
