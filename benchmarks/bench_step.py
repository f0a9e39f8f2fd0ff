# SPDX-License-Identifier: BSD-3-Clause
"""Time everything between ``backward`` and the next forward: check, unscale, clip, update.

The model is only its parameters, and gradients are put in place instead of computed, so that no
forward or backward hides the difference. Every variant clips to the same norm and runs AdamW.

fp32 weights: ``torch.amp.GradScaler``, ``clip_grad_norm_`` and fused AdamW, against O0.
Half weights: the same arithmetic written with torch operations, as people do it by hand, against
O2 (float16, dynamic loss scale) and O5 (bfloat16, no scale).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import preamp
from harness import Row, Variant, measure, provenance, store

MAX_NORM = 1.0
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
# What must be moved at least, in bytes for each parameter: gradients are read once to be checked,
# then read again with weights (masters) and both moments, which are written back, and so is the
# half weight.
LEAST_BYTES = {"fp32": 32, "fp16": 30, "bf16": 30}


class Weights(nn.Module):
    """Parameters in the shapes of a small transformer, and no forward."""

    def __init__(self, layers: int, width: int) -> None:
        """Make ``12 * layers * width**2`` parameters and a little more."""
        super().__init__()
        shapes = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
        shapes += [(width,), (width,)]
        self.blocks = nn.ParameterList(
            torch.randn(shape) * 0.02 for _ in range(layers) for shape in shapes
        )


class Workload:
    """Weights with gradients that are put back before every timed step."""

    def __init__(self, weights: Weights, gradient_dtype: torch.dtype, scale: float) -> None:
        """Draw small gradients and multiply them by the loss scale."""
        self.parameters = list(weights.parameters())
        random = torch.Generator().manual_seed(1)
        self._fresh = [
            (torch.randn(p.shape, generator=random) * 1e-3 * scale).to(p.device, gradient_dtype)
            for p in self.parameters
        ]
        self._buffers = [gradient.clone() for gradient in self._fresh]

    def refill(self) -> None:
        """Undo what a step did to the gradients; not timed."""
        for buffer, gradient in zip(self._buffers, self._fresh, strict=True):
            buffer.copy_(gradient)

    def backward(self) -> None:
        """Stand for ``loss.backward()``: the gradients are there."""
        for parameter, buffer in zip(self.parameters, self._buffers, strict=True):
            parameter.grad = buffer


def with_preamp(weights: Weights, level: str, group: str, loss: Tensor) -> Variant:
    """A step through preamp's public functions."""
    optimizer = torch.optim.AdamW(weights.parameters(), **SETTINGS, fused=True)
    overrides = {"loss_scale": "dynamic"} if level == "O0" else {}
    model, optimizer = preamp.initialize(
        weights, optimizer, opt_level=level, verbosity=0, **overrides
    )
    dtype = next(model.parameters()).dtype
    work = Workload(model, dtype, preamp.engine_of(optimizer).loss_scale(0))

    def step() -> None:
        with preamp.scale_loss(loss, optimizer):
            work.backward()
        preamp.clip_grad_norm_(optimizer, MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()

    return Variant(name=f"preamp {level}", group=group, run=step, prepare=work.refill)


def with_grad_scaler(weights: Weights, loss: Tensor) -> Variant:
    """The usual way with fp32 weights."""
    scaler = torch.amp.GradScaler(loss.device.type)
    scaler.scale(loss)  # makes the scale's tensor
    work = Workload(weights, torch.float32, scaler.get_scale())
    optimizer = torch.optim.AdamW(weights.parameters(), **SETTINGS, fused=True)

    def step() -> None:
        scaler.scale(loss)
        work.backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(work.parameters, MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Variant(name="GradScaler", group="fp32", run=step, prepare=work.refill)


def with_torch_masters(weights: Weights, dtype: torch.dtype, group: str) -> Variant:
    """fp32 masters by hand, in plain torch operations; the scale is left alone.

    The masters' gradients keep their memory from step to step: allocating them anew is slower.
    """
    weights.to(dtype)
    scale = 2.0**16 if dtype is torch.float16 else 1.0
    work = Workload(weights, dtype, scale)
    masters = [nn.Parameter(p.detach().float()) for p in work.parameters]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, **SETTINGS, fused=True)

    def step() -> None:
        work.backward()
        for master, parameter in zip(masters, work.parameters, strict=True):
            master.grad.copy_(parameter.grad).mul_(1 / scale)
        norm = clip_grad_norm_(masters, MAX_NORM)
        if scale == 1.0 or norm.isfinite():  # an infinite gradient makes an infinite norm
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, work.parameters, strict=True):
                    parameter.copy_(master)
        for parameter in work.parameters:
            parameter.grad = None

    return Variant(name=f"torch masters {group}", group=group, run=step, prepare=work.refill)


def copying(numbers: int, device: str) -> Variant:
    """A plain copy: the speed limit of everything above."""
    source, target = (torch.zeros(numbers, device=device) for _ in range(2))
    return Variant(name="copy fp32", group="copy", run=lambda: target.copy_(source))


def main() -> None:
    """Measure, store the rows, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    torch.set_num_threads(1)
    loss = torch.ones((), device=args.device)

    def weights() -> Weights:
        torch.manual_seed(0)
        return Weights(args.layers, args.width).to(args.device)

    count = sum(parameter.numel() for parameter in weights().parameters())
    variants = [
        with_grad_scaler(weights(), loss),
        with_preamp(weights(), "O0", "fp32", loss),
        with_torch_masters(weights(), torch.float16, "fp16"),
        with_preamp(weights(), "O2", "fp16", loss),
        with_torch_masters(weights(), torch.bfloat16, "bf16"),
        with_preamp(weights(), "O5", "bf16", loss),
        copying(count, args.device),
    ]
    wait: Callable[[], object] = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    rows = measure(variants, rounds=args.rounds, synchronize=wait)
    bandwidth = 8 * count / rows[-1].best / 1e6  # GB/s: four bytes read and four written
    facts = {**provenance(args.device), "parameters": count, "copy_gb_s": bandwidth}
    path = store("step", rows, facts)
    show(rows, facts)
    print(f"rows appended to {path}")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Print the table; ratios are to the first variant of each group."""
    title = f"optimizer's side of one step, {facts['parameters']:,} parameters"
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("variant", no_wrap=True)
    for column in ("best ms", "p20", "p50", "p80", "ratio", "spread", "speed"):
        table.add_column(column, justify="right", no_wrap=True)
    previous = rows[0].group
    for row in rows:
        if row.group != previous:
            table.add_section()
            previous = row.group
        least = LEAST_BYTES.get(row.group, 8) * facts["parameters"] / row.best / 1e6
        table.add_row(
            row.name,
            *(f"{value:.2f}" for value in (row.best, row.p20, row.p50, row.p80, row.best_ratio)),
            f"{row.ratio_p20:.2f}–{row.ratio_p80:.2f}",
            f"{least / facts['copy_gb_s']:.0%}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{facts['device']}, {facts['threads']} thread, torch {facts['torch']},"
        f" commit {facts['commit']}\n"
        "ratio: best to the best of the group's first row\n"
        "spread: p20–p80 of the ratios within a round\n"
        f"speed: least memory traffic over best, of the copy's {facts['copy_gb_s']:.1f} GB/s",
        highlight=False,
    )


if __name__ == "__main__":
    main()
