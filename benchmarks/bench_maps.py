# SPDX-License-Identifier: BSD-3-Clause
"""How near moments in 8 bits come to float32 ones, by the values that codes stand for.

The GPT of `bench_storage` learns by float32 AdamW with betas 0.9 and 0.999. Beside it, moments of
the same gradients are stored by every map in each step. Printed is the table of docs/storage.md:
how far Adam's update ``m / (sqrt(v) + eps)`` is at the end from that of float32 moments, where one
of both moments is kept so: the norm of the difference relative to the update's, and the share of
elements that are off by more than a quarter.
"""

# torch leaves these functions untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bench_storage import gpt, loss_of
from preamp.kernels.stored import (
    BLOCK,
    Format,
    can_be_blocks,
    decode,
    encode,
    noise,
    round_by_chance,
)

BETAS, EPS, LR = (0.9, 0.999), 1e-8, 1e-3
Map = Callable[[Tensor, Tensor], Tensor]
"""What becomes of float32 values that are stored, by 16 bits of chance for each."""


def ours(kind: Format) -> Map:
    """The package's own."""
    return lambda wide, chance: decode(*encode(wide, kind, chance), kind)


def bfloat16(wide: Tensor, chance: Tensor) -> Tensor:
    """16 bits."""
    return round_by_chance(wide, chance.view(wide.shape)).float()


def root(power: int, codes: int, *, may_be_zero: bool) -> Map:
    """Codes in proportion to a root of the magnitude."""

    def neighbours(size: Tensor) -> tuple[Tensor, Tensor]:
        share = size / size.amax(1, keepdim=True).clamp(min=1e-30)
        code = (share ** (1 / power) * codes).floor().clamp(max=codes - 1)
        largest = size.amax(1, keepdim=True)
        return (code / codes) ** power * largest, ((code + 1) / codes) ** power * largest

    return _between(neighbours, may_be_zero=may_be_zero)


def small_float(mantissa: int, binades: int, *, may_be_zero: bool) -> Map:
    """Small floats below a power of two, with gradual underflow."""

    def neighbours(size: Tensor) -> tuple[Tensor, Tensor]:
        top = torch.frexp(size.amax(1, keepdim=True)).exponent
        exponent = torch.maximum(torch.frexp(size).exponent, top + 2 - binades)
        step = torch.exp2(exponent.float() - 1 - mantissa)
        low = (size / step).floor() * step
        return low, low + step

    return _between(neighbours, may_be_zero=may_be_zero)


def _between(neighbours: Callable[[Tensor], tuple[Tensor, Tensor]], *, may_be_zero: bool) -> Map:
    """Rounds magnitudes to one of the nearest two by chance, block by block."""

    def kept(wide: Tensor, chance: Tensor) -> Tensor:
        size = wide.abs().view(-1, min(BLOCK, wide[0].numel()))  # rows here are whole blocks
        low, high = neighbours(size)
        is_up = chance.view(size.shape) < (size - low) / (high - low) * 2**16
        if not may_be_zero:
            is_up |= low == 0
        return torch.where(is_up & (size > 0), high, low).view(wide.shape).copysign(wide)

    return kept


FIRST: dict[str, Map] = {
    "small floats, 5 bits of mantissa (taken)": ours(Format.SIGNED),
    "small floats, 4 bits of mantissa": small_float(4, 8, may_be_zero=True),
    "square root": root(2, 127, may_be_zero=True),
    "linear": root(1, 127, may_be_zero=True),
    "bfloat16": bfloat16,
}
SECOND: dict[str, Map] = {
    "small floats, 5 bits of mantissa (taken)": ours(Format.UNSIGNED),
    "small floats, 4 bits of mantissa": small_float(4, 16, may_be_zero=False),
    "square root": root(2, 255, may_be_zero=False),
    "fourth root": root(4, 255, may_be_zero=False),
    "linear": root(1, 255, may_be_zero=False),
    "bfloat16": bfloat16,
}


@dataclass
class Moment:
    """One moment of a parameter, as float32 and as every map keeps it."""

    beta: float
    maps: dict[str, Map]
    row: int
    exact: Tensor
    kept: dict[str, Tensor] = field(default_factory=dict[str, Tensor])

    def update(self, value: Tensor, step: int, number: int) -> None:
        """Take in a gradient, or its square."""
        told = {"start": 0, "step": step, "row": self.row, "seed": 0, "number": number}
        chance = noise(value.numel(), **told, device=value.device)
        self.exact = self.exact.lerp(value, 1 - self.beta)
        for name, kept_as in self.maps.items():
            before = self.kept.get(name, torch.zeros_like(value))
            self.kept[name] = kept_as(before.lerp(value, 1 - self.beta), chance)


def train(steps: int, seed: int) -> list[tuple[Moment, Moment]]:
    """Train, and return the moments of all matrices at the end."""
    task = gpt(steps)
    model = task.model(seed)
    params = [param for param in model.parameters() if can_be_blocks(param.shape)]
    zeros = [torch.zeros_like(param.detach()) for param in params]
    found = [(Moment(BETAS[0], FIRST, 0, z), Moment(BETAS[1], SECOND, 1, z)) for z in zeros]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, eps=EPS)
    for step, (inputs, targets) in enumerate(task.batches(seed), 1):
        optimizer.zero_grad()
        loss_of(model, inputs, targets).backward()
        for number, (param, (first, second)) in enumerate(zip(params, found, strict=True)):
            if param.grad is not None:
                first.update(param.grad, step, number)
                second.update(param.grad.square(), step, number)
        optimizer.step()
    return found


def errors(found: list[tuple[Moment, Moment]], steps: int, name: str, place: int) -> str:
    """What a map makes of the updates if the moment at ``place`` is kept by it, in words."""
    one, two = (1 - beta**steps for beta in BETAS)
    exact: list[Tensor] = []
    off: list[Tensor] = []
    for pair in found:
        kept = [moment.exact for moment in pair]
        for values in (exact, off):
            m, v = kept
            values.append((m / one / ((v / two).sqrt() + EPS)).flatten())
            kept[place] = pair[place].kept[name]
    update = torch.cat(exact)
    far = (torch.cat(off) - update).abs()
    return f"{float(far.norm() / update.norm()):.1%}, {_share(far > 0.25 * update.abs()):.1%}"


def _share(which: Tensor) -> float:
    return float(which.float().mean())


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    found = train(options.steps, options.seed)
    print("| a moment as | first moment | second moment |\n|---|---|---|")
    for name in SECOND:
        rows = enumerate((FIRST, SECOND))
        cells = [errors(found, options.steps, name, at) if name in row else "–" for at, row in rows]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
