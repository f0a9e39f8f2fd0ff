# SPDX-License-Identifier: BSD-3-Clause
"""PA3xx: computations that need more digits than half precision has."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import nn

from preamp.casting.autocast_state import is_any_autocast_on
from preamp.core.dtypes import dtype_name, is_half
from preamp.core.torch_private.autograd import casts_of_leaves, half_loss_dtype
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
    training. A variance above 65504 is infinite in float16.""",
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
    bfloat16. Or a function of torch such as cross_entropy has computed it so before it was cast, or
    a loss module of torch.nn returned one. Losses that are written by hand and then cast are not
    seen.""",
    do="""Hand the loss function float32: criterion(output.float(), target). Loss functions of torch
    run in float32 under autocast and at preamp's O1 and O4 by themselves.""",
)
FIRST_WEIGHTS = define_rule(
    id="PA304",
    severity=Severity.ERROR,
    title="An autocast region around the loop keeps the weights of its first step",
    why="""Autocast casts each float32 weight once, and keeps the half copy until the outermost
    region ends. If that is around the whole loop, all forwards compute with the weights of the
    first one. The optimizer moves weights that nobody reads. Only layers that are not cast
    learn.""",
    how="""A backward begins inside of a region, and the graphs of losses in three steps of its
    optimizer have the same cast of a weight. Looked at is the first loss of each of the first 16
    steps. What is compiled is not seen.""",
    do="""Enter autocast anew in each step, around the forward and the loss alone. If it has to be
    around the loop, pass cache_enabled=False.""",
)

_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.__bases__[0]  # its own name is private
_LOSS_MODULES = "torch.nn.modules.loss"
_LOOKS = 16
_SERVED = 3  # steps; in a region around one iteration of a GAN there are two
_SERVED_AT = "preamp: steps of the weight's optimizer"


class BatchNorm(Detector):
    """Finds PA301."""

    RULES = (HALFBATCH_NORM,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._layers: dict[int, tuple[str, torch.dtype]] = {}
        self._where: Place | None = None

    def module_called(self, module: nn.Module, output: Any) -> None:
        """Note BatchNorm layers in half."""
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
        """Look at the tensor that backward starts from, and at what it was cast from."""
        if loss.numel() != 1 or not self.findings.is_new(HALF_LOSS, "loss"):
            return
        if is_half(loss):
            self._report(loss, loss.dtype, "The loss is")
        elif (dtype := half_loss_dtype(loss)) is not None:
            self._report(loss, dtype, "The loss was cast after it had been computed in")

    def module_called(self, module: nn.Module, output: Any) -> None:
        """Look at what loss modules return."""
        kind = type(module)
        if (
            any(base.__module__ == _LOSS_MODULES for base in kind.__mro__)
            and isinstance(output, torch.Tensor)
            and output.requires_grad
            and is_half(output)
        ):
            self._report(output, output.dtype, f"What {kind.__name__} returned is")

    def _report(self, loss: torch.Tensor, dtype: torch.dtype, what: str) -> None:
        if not self.findings.is_new(HALF_LOSS, "loss"):
            return
        form = FORMATS[dtype_name(dtype)]
        value = float(loss.detach().float().mean())
        numbers: dict[str, Any] = {"dtype": form.name}
        text = f"{value}"
        if math.isfinite(value) and value:
            exponent = max(math.frexp(abs(value))[1] - 1, form.min_exponent)
            spacing = 2.0 ** (exponent - form.mantissa_bits)
            numbers |= {"loss": value, "spacing": spacing}
            text = f"{value:.4g}, where neighbours are {spacing:.2g} apart"
        self.report(HALF_LOSS, "loss", f"{what} {form.name}; its value is {text}.", **numbers)


class CachedCasts(Detector):
    """Finds PA304."""

    RULES = (FIRST_WEIGHTS,)

    def __init__(self, seen: Seen, findings: Findings) -> None:
        super().__init__(seen, findings)
        self._looked_at = -1  # the step

    def loss_made(self, loss: torch.Tensor) -> None:
        """Note in each cast of a weight, which autocast may keep, after what steps it is used."""
        step = self.seen.steps
        is_due = self._looked_at < step < _LOOKS and is_any_autocast_on()
        if not is_due or loss.grad_fn is None:
            return
        self._looked_at = step
        steps = {
            id(param): self.seen.counts(optimizer)[0]
            for optimizer in tuple(self.seen.optimizers)
            for param in self.seen.params(optimizer)
        }
        # By weight: a graph that goes back over several steps has a cast of each.
        served: dict[int, int] = {}
        for node, weight in casts_of_leaves(loss.grad_fn):
            # Numbers alone, which live as long as the node does and keep nothing alive. Versions
            # would not do: torch's fused optimizers raise none.
            known = cast("Any", node).metadata.setdefault(_SERVED_AT, set())
            known.add(steps.get(id(weight), 0))
            served[id(weight)] = min(len(known), served.get(id(weight), _SERVED))
        kept = sum(count >= _SERVED for count in served.values())
        if kept:
            what = f"{kept} weights are used as they were cast {_SERVED - 1} steps ago or earlier."
            self.report(FIRST_WEIGHTS, "casts", what, weights=kept)
