# SPDX-License-Identifier: BSD-3-Clause
"""Data-parallel training of a small network on digits, one process for each half of a batch.

torchrun --nproc-per-node 2 gloo.py --opt-level O2
"""

import argparse
import os

import torch
import torch.distributed as dist
from apex import amp
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
# Launchers before torchrun passed the rank as an argument.
parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", 0)), type=int)
parser.add_argument("--opt-level", default="O1")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--batch-size", type=int, default=64)


def main():
    args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group(backend="gloo", init_method="env://")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
    if world > 1:
        model = DistributedDataParallel(model)

    digits = load_digits()
    images = torch.from_numpy(digits.data).float() / 16
    targets = torch.from_numpy(digits.target)
    generator = torch.Generator().manual_seed(0)
    share = args.batch_size // world
    losses = []
    for _ in range(args.steps):
        index = torch.randint(len(images), (args.batch_size,), generator=generator)
        mine = index[args.local_rank * share : (args.local_rank + 1) * share]
        loss = nn.functional.cross_entropy(model(images[mine]), targets[mine])
        optimizer.zero_grad()
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        reduced = loss.detach().clone()
        if world > 1:
            dist.all_reduce(reduced)
        losses.append(reduced.item() / world)

    weights = torch.cat([p.detach().float().flatten() for p in model.parameters()])
    if world > 1:
        low, high = weights.clone(), weights.clone()
        dist.all_reduce(low, op=dist.ReduceOp.MIN)
        dist.all_reduce(high, op=dist.ReduceOp.MAX)
        print(f"rank {args.local_rank}: weights agree {torch.equal(low, high)}")
        dist.barrier()  # a rank that has gone can abort one that is still leaving
        dist.destroy_process_group()
    if args.local_rank == 0:
        print(f"final loss {sum(losses[-10:]) / 10:.6f} final metric {losses[0]:.6f}")


if __name__ == "__main__":
    main()
