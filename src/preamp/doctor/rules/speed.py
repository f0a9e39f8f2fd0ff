# SPDX-License-Identifier: BSD-3-Clause
"""PA5xx: half precision that is slower than it could be."""

from __future__ import annotations

import math
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
    channels in and out. Reported are layers with at least 16 million multiplications in a call.
    Products outside such layers are not seen.""",
    do="""Pad features, channels, the vocabulary and the batch to the next multiple of 8, better of
    64. Padded classes need a mask only if they are sampled from.""",
)

_TILE = 8
_FEWEST = 1 << 24  # multiplications
_SHOWN = 3
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class TensorCores(Detector):
    """Finds PA501."""

    RULES = (ODD_SHAPES,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        # Of each large layer with odd sizes: its multiplications, what to say of it, its line.
        self._layers: dict[int, tuple[int, str, Place | None]] = {}

    def module_called(self, module: nn.Module, output: Any) -> None:
        """Note the sizes of a layer that computes in half."""
        product = None if id(module) in self._layers else _product_of(module, output)
        if product is None:
            return
        (rows, inner, columns), sizes = product
        odd = [f"{size} {name}" for name, size in sizes.items() if size % _TILE]
        if odd and rows * inner * columns >= _FEWEST:
            text = f"{self.seen.name(module)} multiplies ({rows}, {inner}) by ({inner}, {columns}):"
            text = f"{text} {', '.join(odd)}"
            self._layers[id(module)] = rows * inner * columns, text, current_place()

    def run_ended(self) -> None:
        """Report the largest layers."""
        worst = sorted(self._layers.values(), key=lambda layer: -layer[0])
        if worst:
            shown = "; ".join(text for _, text, _ in worst[:_SHOWN])
            more = f"; {len(worst) - _SHOWN} more" if len(worst) > _SHOWN else ""
            what = f"On GPUs these miss tensor cores' tiles of {_TILE}: {shown}{more}."
            self.report(ODD_SHAPES, "layers", what, where=worst[0][2], layers=len(worst))


def _product_of(
    module: nn.Module, output: Any
) -> tuple[tuple[int, int, int], dict[str, int]] | None:
    """Rows, inner size and columns of a layer's product in half, and its sizes by name."""
    if not isinstance(output, torch.Tensor) or not is_half(output) or not output.requires_grad:
        return None
    if isinstance(module, nn.Linear):
        rows = output.numel() // max(module.out_features, 1)
        sizes = {"rows": rows, "features in": module.in_features}
        sizes["features out"] = module.out_features
        return (rows, module.in_features, module.out_features), sizes
    if isinstance(module, _CONVOLUTIONS) and module.groups == 1:
        rows = output.numel() // max(module.out_channels, 1)
        inner = module.in_channels * math.prod(module.kernel_size)
        sizes = {"channels in": module.in_channels, "channels out": module.out_channels}
        return (rows, inner, module.out_channels), sizes
    return None
