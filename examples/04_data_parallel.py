# SPDX-License-Identifier: BSD-3-Clause
"""Several processes, each with its part of every batch.

Alone, or ``torchrun --nproc-per-node 2 examples/04_data_parallel.py``.
"""

from __future__ import annotations

import argparse
import os
import socket

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import preamp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--opt-level", default="O2")
    args = parser.parse_args()

    if "WORLD_SIZE" not in os.environ:  # not started by torchrun
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        alone = {"WORLD_SIZE": "1", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    inputs = torch.rand(1024, 16) * 2 - 1
    targets = (inputs[:, :4].sum(dim=1) > inputs[:, 4:8].sum(dim=1)).long()

    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=args.opt_level)
    model = DistributedDataParallel(model)

    first = last = float("nan")
    for step in range(args.steps):
        batch = torch.randint(len(inputs), (128,))[rank::ranks]  # its part of the same batch
        loss = F.cross_entropy(model(inputs[batch]), targets[batch])
        with preamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        preamp.clip_grad_norm_(optimizer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        first = last if step == 0 else first

    if rank == 0:
        print(f"loss {first:.3f} -> {last:.3f} in {args.steps} steps at {args.opt_level}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
