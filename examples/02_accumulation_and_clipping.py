# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of several small batches make one step, and their norm is limited.

Each small batch has a ``scale_loss`` of its own; gradients are unscaled before they are summed,
so the loss scale may change between two of them.
"""

from __future__ import annotations

import argparse

import torch
from torch.nn import functional as F

import preamp

SMALL_BATCHES = 4
MAX_NORM = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--opt-level", default="O2")
    args = parser.parse_args()

    torch.manual_seed(0)
    inputs = torch.randn(2048, 32)
    targets = torch.sin(inputs @ torch.randn(32, 4) / 4)

    model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=args.opt_level)

    losses: list[float] = []
    clipped = 0
    for _ in range(args.steps):
        total = 0.0
        for _ in range(SMALL_BATCHES):
            batch = torch.randint(len(inputs), (64,))
            loss = F.mse_loss(model(inputs[batch]), targets[batch]) / SMALL_BATCHES
            with preamp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            total += loss.item()
        norm = preamp.clip_grad_norm_(optimizer, MAX_NORM)
        clipped += int(norm > MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)

    applied = preamp.engine_of(optimizer).steps_applied
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps at {args.opt_level}")
    print(f"{applied} steps applied, {clipped} clipped to norm {MAX_NORM}")


if __name__ == "__main__":
    main()
