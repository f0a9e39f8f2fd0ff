# SPDX-License-Identifier: BSD-3-Clause
"""PA5xx: half precision that is slower than it could be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from preamp.core.dtypes import is_half
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, define_rule
from preamp.doctor.seen import Seen

ODD_SHAPES = define_rule(
    id="PA501",
    severity=Severity.INFO,
    title="Matrix sizes are no multiples of 8",
    why="""On NVIDIA GPUs half precision is fast because tensor cores multiply small tiles. Matrices
    whose sizes are not multiples of 8 are padded, or go to slower kernels. A vocabulary of 50257 is
    the best-known case. On CPUs this does not matter.""",
    how="""Linear and convolution layers that compute in half: number of rows, features in and out,
    channels in and out. Reported if layers with at least 16 million multiplications in a call make
    up 5 % of all multiplications seen. Products outside such layers are not seen.""",
    do="""Pad features, channels, the vocabulary and the batch to the next multiple of 8, better of
    64. Padded classes need a mask only if they are sampled from.""",
)

_TILE = 8
_FEWEST_PRODUCTS = 1 << 24
_LEAST_SHARE = 0.05
_SHOWN = 3
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True, slots=True)
class _Product:
    """The matrix product of one layer: (rows, inner) times (inner, columns)."""

    rows: int
    inner: int
    columns: int
    odd: tuple[str, ...]

    @property
    def multiplications(self) -> int:
        return self.rows * self.inner * self.columns


class TensorCores(Detector):
    """Finds PA501."""

    RULES = (ODD_SHAPES,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._layers: dict[int, tuple[str, _Product, Place | None]] = {}
        self._all: dict[int, int] = {}

    def module_called(self, module: nn.Module, output: Any) -> None:
        """Note the sizes of a layer that computes in half."""
        product = _product_of(module, output)
        if product is None:
            return
        key = id(module)
        self._all[key] = max(self._all.get(key, 0), product.multiplications)
        if product.odd and product.multiplications >= _FEWEST_PRODUCTS and key not in self._layers:
            self._layers[key] = self.seen.name(module), product, current_place()

    def run_ended(self) -> None:
        """Report the largest layers."""
        total = sum(self._all.values())
        worst = sorted(self._layers.values(), key=lambda layer: -layer[1].multiplications)
        share = sum(product.multiplications for _, product, _ in worst) / max(total, 1)
        if not worst or share < _LEAST_SHARE:
            return
        shown = "; ".join(
            f"{name} multiplies ({p.rows}, {p.inner}) by ({p.inner}, {p.columns}): "
            f"{', '.join(p.odd)}"
            for name, p, _ in worst[:_SHOWN]
        )
        more = f"; {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
        self.report(
            ODD_SHAPES,
            "layers",
            f"On GPUs {share:.0%} of the multiplications in half miss tensor cores' tiles of "
            f"{_TILE}. {shown}{more}.",
            where=worst[0][2],
            share=share,
            layers=[
                {"name": name, "rows": p.rows, "inner": p.inner, "columns": p.columns}
                for name, p, _ in worst
            ],
        )


def _product_of(module: nn.Module, output: Any) -> _Product | None:
    if not isinstance(output, torch.Tensor) or not is_half(output) or not output.requires_grad:
        return None
    if isinstance(module, nn.Linear):
        rows = output.numel() // max(module.out_features, 1)
        sizes = {"rows": rows, "features in": module.in_features}
        sizes["features out"] = module.out_features
        return _Product(rows, module.in_features, module.out_features, _odd(sizes))
    if isinstance(module, _CONVOLUTIONS) and module.groups == 1:
        rows = output.numel() // max(module.out_channels, 1)
        inner = module.in_channels * math.prod(module.kernel_size)
        sizes = {"channels in": module.in_channels, "channels out": module.out_channels}
        return _Product(rows, inner, module.out_channels, _odd(sizes))
    return None


def _odd(sizes: dict[str, int]) -> tuple[str, ...]:
    return tuple(f"{size} {name}" for name, size in sizes.items() if size % _TILE)
