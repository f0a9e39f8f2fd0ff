# SPDX-License-Identifier: BSD-3-Clause
"""A model under ``fully_shard``, checkpointed by torch while it trains, as in torchtitan.

Alone, or ``torchrun --nproc-per-node 2 examples/06_fully_sharded.py``.
"""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import preamp
from preamp.optimizers import FusedAdam


class Run:
    """A model of two sharded blocks that learns which token follows which."""

    def __init__(self, opt_level: str) -> None:
        torch.manual_seed(0)  # ranks begin with the same weights
        block = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
        fully_shard(block)
        model = fully_shard(nn.Sequential(nn.Embedding(32, 32), block, nn.Linear(32, 32)))
        optimizer = FusedAdam(model.parameters(), lr=3e-3)
        self.model, self.optimizer = preamp.initialize(model, optimizer, opt_level=opt_level)
        self.state = preamp.RunState(self.model, self.optimizer)  # each rank has its parts

    def step(self, number: int) -> float:
        """Learn from this rank's batch; returns the loss."""
        seed = dist.get_rank() + dist.get_world_size() * number
        tokens = torch.randint(32, (256,), generator=torch.Generator().manual_seed(seed))
        loss = F.cross_entropy(self.model(tokens), (tokens + 1) % 32)
        with preamp.scale_loss(loss, self.optimizer) as scaled_loss:
            scaled_loss.backward()
        preamp.clip_grad_norm_(self.optimizer, 1.0)  # over all ranks
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def main() -> None:
    """Train, save on the way, and go on from there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--opt-level", default="O5")
    args = parser.parse_args()
    folders = [tempfile.mkdtemp()]
    alone = {"init_method": f"file://{folders[0]}/meet", "rank": 0, "world_size": 1}
    dist.init_process_group("gloo", **({} if "WORLD_SIZE" in os.environ else alone))
    dist.broadcast_object_list(folders)  # all write into the first rank's
    run, again, half = Run(args.opt_level), Run(args.opt_level), args.steps // 2
    losses = [run.step(number) for number in range(half)]
    writers = dist.new_group(backend="gloo")  # the writing meets beside the training
    saving = dcp.async_save(
        {"run": run.state}, checkpoint_id=folders[0] + "/half", process_group=writers
    )
    losses += [run.step(number) for number in range(half, args.steps)]
    saving.result()
    dcp.load({"run": again.state}, checkpoint_id=folders[0] + "/half")
    same = [again.step(number) for number in range(half, args.steps)] == losses[half:]
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps at {args.opt_level}")
        print(f"started anew after {half} steps, went on bitwise as without: {same}")


main()  # returns without a group in any variable: torch ends badly with one that is still held
dist.destroy_process_group()
