# SPDX-License-Identifier: BSD-3-Clause
"""Learning rate and step counter on the device, and torch's ``GradScaler`` without a host read.

``torch.amp.GradScaler.step`` looks for ``_step_supports_amp_scaling`` on the optimizer. If it is
there, gradients are handed over scaled, and the scale and the overflow flag lie on the optimizer
as ``grad_scale`` and ``found_inf`` for the time of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.errors import message
from preamp.core.tensors import host_reaches
from preamp.kernels import Ops
from preamp.optim.fused.base import Group, scalar_on


@dataclass(frozen=True, slots=True)
class Signals:
    """What a ``GradScaler`` says about the gradients at hand.

    Attributes:
        inv_scale: float32 scalar that unscales them; ``None`` if they are not scaled.
        found_inf: float32 scalar, not zero if one is infinite or nan; ``None`` if nobody looked.
    """

    inv_scale: torch.Tensor | None
    found_inf: torch.Tensor | None

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer) -> Signals:
        """Read what lies on the optimizer now."""
        scale: Any = getattr(optimizer, "grad_scale", None)
        found_inf: Any = getattr(optimizer, "found_inf", None)
        return cls(
            scale.reciprocal() if isinstance(scale, torch.Tensor) else None,
            # Without any gradient the scaler leaves the number 0 here.
            found_inf if isinstance(found_inf, torch.Tensor) else None,
        )

    @property
    def is_skip(self) -> bool:
        """Whether the step must do nothing, as far as that can be known without waiting."""
        found_inf = self.found_inf
        return found_inf is not None and host_reaches(found_inf) and bool(found_inf != 0)

    def unscale_(self, grads: Sequence[torch.Tensor], ops: Ops) -> None:
        """Leave the gradients unscaled after the step, as torch's fused optimizers do.

        After it, not before: a half gradient would lose its small values. Gradients of a
        skipped step stay as they are.
        """
        if self.inv_scale is None:
            return
        factor = self.inv_scale
        if self.found_inf is not None:
            factor = torch.where(self.found_inf != 0, torch.ones_like(factor), factor)
        ops.scale_add_(grads, factor, [None] * len(grads))


def place_on_device(group: Group) -> None:
    """Make ``lr`` and ``step`` of a group 0-dim tensors of its own, where its parameters are."""
    if not group["params"]:
        return
    param: torch.Tensor = group["params"][0]
    for name, dtype in (("lr", math_dtype(param.dtype)), ("step", torch.int32)):
        group[name] = scalar_on(group.get(name, 0), dtype, param.device).clone()


def count_on_device(group: Group, found_inf: torch.Tensor | None) -> torch.Tensor:
    """Advance the group's counter unless the step is skipped, and return it."""
    if not isinstance(group.get("step"), torch.Tensor):  # a number that a script has put there
        place_on_device(group)
    step: torch.Tensor = group["step"]
    step += 1 if found_inf is None else (found_inf == 0).to(step.device, step.dtype)
    return step


def count_step(group: Group, signals: Signals) -> int | torch.Tensor:
    """Advance the group's counter unless the step is skipped, and return it.

    A number stays one as long as the host knows whether the step is taken.
    """
    knows = signals.found_inf is None or host_reaches(signals.found_inf)
    step = group.get("step", 0)
    if knows and not isinstance(step, torch.Tensor):
        group["step"] = int(step) + 1
        return group["step"]
    if not isinstance(step, torch.Tensor) and group["params"]:
        group["step"] = scalar_on(step, torch.int32, group["params"][0].device)
    return count_on_device(group, signals.found_inf)


def names_scaler(kind: str, given: dict[str, Any]) -> bool:
    """Whether the extra keyword arguments of a ``step`` name a ``GradScaler``.

    Raises:
        TypeError: There is an argument of another name.
    """
    unknown = sorted(given.keys() - {"grad_scaler"})
    if unknown:
        raise TypeError(
            message(
                f"{kind}.step() got {', '.join(map(repr, unknown))}",
                "Its only other keyword argument is 'grad_scaler'",
                "Check the spelling",
            )
        )
    return given.get("grad_scaler") is not None
