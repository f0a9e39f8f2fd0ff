# SPDX-License-Identifier: BSD-3-Clause
"""The smallest loop: one call before it, one context manager around ``backward``."""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

import preamp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--opt-level", default="O2")
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.rand(1024, 16) * 2 - 1
    targets = (inputs[:, :4].sum(dim=1) > inputs[:, 4:8].sum(dim=1)).long()

    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=args.opt_level)

    first = last = float("nan")
    for step in range(args.steps):
        batch = torch.randint(len(inputs), (128,))
        loss = F.cross_entropy(model(inputs[batch]), targets[batch])
        with preamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        last = loss.item()
        first = last if step == 0 else first

    print(f"loss {first:.3f} -> {last:.3f} in {args.steps} steps at {args.opt_level}")


if __name__ == "__main__":
    main()
