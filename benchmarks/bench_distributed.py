# SPDX-License-Identifier: BSD-3-Clause
"""What preamp adds to a step under DistributedDataParallel, next to plain DDP's step.

All ranks run on this machine, joined by gloo, a thread each. Under DDP preamp calls no collective
of its own in a step; where ranks have to tell each other of an overflow, as those with sharded
gradients do, it is one all-reduce of a few bytes. On more ranks a tree of two-rank messages takes
``t(n) = t(2) * log2(n)``, with ``t(2)`` as measured here.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

import preamp
from preamp.bench import records
from preamp.bench.harness import Effort, Row, Variant, measure, stopwatch
from preamp.parallel import shard_optimizer

RANKS = 2
WORLDS = (8, 64, 1024)
BASELINE = "plain DDP"
WAYS = {"preamp O0": ("O0", False), "preamp O5": ("O5", False), "preamp O5, ZeRO-1": ("O5", True)}
COLLECTIVES = {"all-reduce, 16 bytes": 4, "all-reduce, 4 KiB": 1024}


def make_step(level: str | None, width: int, *, is_shared: bool = False) -> Callable[[], None]:
    """A whole training step of a model with four linear layers.

    Args:
        level: The opt level; ``None`` for plain torch.
        width: Of the layers.
        is_shared: Whether ranks share optimizer state and masters.
    """
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if level is not None:
        preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    wrapped = DistributedDataParallel(model)
    if is_shared:
        shard_optimizer(optimizer)
    batch = torch.randn(16, width)

    def step() -> None:
        loss = wrapped(batch).float().square().mean()
        if level is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            preamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def rank_main(rank: int, folder: str, width: int, rounds: int) -> None:
    """Measure on one rank; the first one writes the rows down."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)

    def variant(name: str, group: str, work: Callable[[], Any]) -> Variant:
        return Variant(name=name, group=group, seconds=stopwatch(work))

    variants = [variant(BASELINE, "step", make_step(None, width))]
    for name, (level, is_shared) in WAYS.items():
        variants.append(variant(name, "step", make_step(level, width, is_shared=is_shared)))
    for name, elements in COLLECTIVES.items():
        vector = torch.zeros(elements)
        variants.append(variant(name, name, lambda vector=vector: dist.all_reduce(vector)))
    # As many rounds on every rank, in one order: each is a matter of all.
    rows = measure(variants, Effort(seconds=0.0, least=rounds, most=rounds, warmup=3))
    if rank == 0:
        found = [records.measured(row) for row in rows]
        Path(folder, "rows.json").write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


def derived(row: Row | dict[str, Any]) -> dict[int, float]:
    """Milliseconds of a two-rank all-reduce on more ranks."""
    best = row["best"] if isinstance(row, dict) else row.best
    return {world: best * math.log2(world) for world in WORLDS}


def main() -> None:
    """Measure, print, and append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=30)
    here = Path(__file__).parent
    parser.add_argument("--out", type=Path, default=here / "results/distributed.jsonl")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, (folder, given.width, given.rounds), nprocs=RANKS)
        rows = json.loads(Path(folder, "rows.json").read_text(encoding="utf-8"))
    where = {"benchmark": "distributed", "ranks": RANKS, "width": given.width}
    for row in rows:
        row.update(where | records.provenance(torch.device("cpu")))
    records.append(given.out, rows)
    print(f"{RANKS} ranks on one machine, {4 * given.width * (given.width + 1):,} parameters, ms")
    for row in rows:
        ratio = f"  ×{row['best_ratio']:.2f}" if row["group"] == "step" else ""
        print(f"  {row['name']:22} best {row['best']:8.3f}  median {row['p50']:8.3f}{ratio}")
    print("Derived, t(n) = t(2) · log2(n), ms: " + ", ".join(f"{world} ranks" for world in WORLDS))
    for row in rows:
        if row["name"] in COLLECTIVES:
            times = "  ".join(f"{time:8.3f}" for time in derived(row).values())
            print(f"  {row['name']:22} {times}")


if __name__ == "__main__":
    main()
