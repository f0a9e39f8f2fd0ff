# SPDX-License-Identifier: BSD-3-Clause
"""A run that can be stopped at any time and goes on, bitwise, where it was.

Stopped by SIGTERM, as schedulers of clusters do, it finishes its step, saves, and exits with
status 143. Killed, it goes on from the newest complete file. Here it stops itself half-way.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile

import torch
from torch.nn import functional as F

import preamp
from preamp.checkpoint import latest_checkpoint


def train(folder: str, steps: int, until: int, opt_level: str) -> tuple[int, list[float]]:
    """Train up to step ``until``, from the newest checkpoint in ``folder`` if there is one."""
    torch.manual_seed(0)
    inputs = torch.randn(1024, 16)
    targets = torch.sin(inputs @ torch.randn(16, 2) / 4)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model, optimizer = preamp.initialize(model, optimizer, opt_level=opt_level)

    start, losses = 0, []
    path = latest_checkpoint(folder)
    if path is not None:
        extra = preamp.load_checkpoint(path, model, optimizer, scheduler)
        start, losses = extra["step"], extra["losses"]

    asked: list[int] = []  # to stop, after the step under way
    before = signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    for step in range(start + 1, until + 1):
        batch = torch.randint(len(inputs), (128,))
        loss = F.mse_loss(model(inputs[batch]), targets[batch])
        with preamp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        preamp.step_scheduler(scheduler, optimizer)
        losses.append(loss.item())
        if asked or step % 20 == 0 or step == until:
            extra = {"step": step, "losses": losses}
            file = f"{folder}/step_{step}.safetensors"
            preamp.save_checkpoint(file, model, optimizer, scheduler, extra, keep_last=2)
        if asked:
            sys.exit(128 + signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)
    return start, losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--opt-level", default="O2")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as parts:
        _, expected = train(whole, args.steps, args.steps, args.opt_level)
        train(parts, args.steps, args.steps // 2, args.opt_level)
        start, losses = train(parts, args.steps, args.steps, args.opt_level)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} in {args.steps} steps at {args.opt_level}")
    print(f"stopped after {start} steps, went on bitwise as without: {losses == expected}")


if __name__ == "__main__":
    main()
