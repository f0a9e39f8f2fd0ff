# SPDX-License-Identifier: BSD-3-Clause
"""PA3xx: computations that need more digits than half precision has."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from preamp.core.dtypes import dtype_name, is_half
from preamp.doctor.detector import Detector, Findings
from preamp.doctor.rule import Place, Severity, current_place, define_rule
from preamp.doctor.seen import Seen
from preamp.numerics import FORMATS

HALFBATCH_NORM = define_rule(
    id="PA301",
    severity=Severity.WARNING,
    title="BatchNorm keeps weights or statistics in half",
    why="""The running mean and variance move by a tenth of a difference per step. In half precision
    small differences round away, so the statistics that evaluation uses are not those of the
    training; a variance above 65504 is infinite in float16.""",
    how="""A BatchNorm layer was called in training mode, and its running statistics or its weight
    are float16 or bfloat16. Half inputs to a float32 BatchNorm are fine.""",
    do="""Keep BatchNorm in float32: preamp's O2 and O5 do (keep_batchnorm_fp32). By hand, call
    .float() on these layers after model.half().""",
)
HALF_LOSS = define_rule(
    id="PA302",
    severity=Severity.WARNING,
    title="The loss is computed in half precision",
    why="""A loss is a sum over many elements, often of exponentials and logarithms. In half
    precision large terms overflow, small ones drop out of the sum, and what is printed has two or
    three digits. Its first derivative starts the whole backward.""",
    how="""The tensor that backward starts from, or that a loss scaler is given, is float16 or
    bfloat16; or a loss module of torch.nn returned one.""",
    do="""Hand the loss function float32: criterion(output.float(), target). Loss functions of torch
    run in float32 under autocast and at preamp's O1 and O4 by themselves.""",
)

_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.__bases__[0]  # its own name is private
_LOSS_MODULES = "torch.nn.modules.loss"


class BatchNorm(Detector):
    """Finds PA301."""

    RULES = (HALFBATCH_NORM,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._layers: dict[int, tuple[str, torch.dtype]] = {}
        self._where: Place | None = None

    def module_called(self, module: nn.Module, output: Any) -> None:
        """Note BatchNorm layers in half."""
        del output
        if not isinstance(module, _BATCH_NORM) or not module.training or id(module) in self._layers:
            return
        held = (getattr(module, name, None) for name in ("running_var", "running_mean", "weight"))
        half = [tensor for tensor in held if isinstance(tensor, torch.Tensor) and is_half(tensor)]
        if half:
            self._where = self._where or current_place()
            self._layers[id(module)] = self.seen.name(module), half[0].dtype

    def run_ended(self) -> None:
        """Report all layers at once."""
        if not self._layers:
            return
        names = [name for name, _ in self._layers.values()]
        dtype = dtype_name(next(iter(self._layers.values()))[1])
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        self.report(
            HALFBATCH_NORM,
            "layers",
            f"{len(names)} BatchNorm layer(s) are {dtype}: {names[0]}{more}.",
            where=self._where,
            layers=names,
            dtype=dtype,
        )


class HalfLoss(Detector):
    """Finds PA302."""

    RULES = (HALF_LOSS,)

    def loss_made(self, loss: torch.Tensor) -> None:
        """Look at the tensor that backward starts from."""
        if is_half(loss) and loss.numel() == 1:
            self._report(loss, "The loss")

    def module_called(self, module: nn.Module, output: Any) -> None:
        """Look at what loss modules return."""
        kind = type(module)
        if (
            any(base.__module__ == _LOSS_MODULES for base in kind.__mro__)
            and isinstance(output, torch.Tensor)
            and output.requires_grad
            and is_half(output)
        ):
            self._report(output, f"What {kind.__name__} returned")

    def _report(self, loss: torch.Tensor, what: str) -> None:
        if not self.is_new(HALF_LOSS, "loss"):
            return
        form = FORMATS[dtype_name(loss.dtype)]
        value = float(loss.detach().float().mean())
        text = f"{what} is {form.name}"
        if not math.isfinite(value) or value == 0:
            self.report(HALF_LOSS, "loss", f"{text}; its value is {value}.", dtype=form.name)
            return
        exponent = max(math.frexp(abs(value))[1] - 1, form.min_exponent)
        spacing = 2.0 ** (exponent - form.mantissa_bits)
        self.report(
            HALF_LOSS,
            "loss",
            f"{text}; its value is {value:.4g}, where neighbours are {spacing:.2g} apart.",
            dtype=form.name,
            loss=value,
            spacing=spacing,
        )
