# SPDX-License-Identifier: BSD-3-Clause
"""FusedMixedPrecisionLamb."""

from __future__ import annotations

from typing import Any

import torch

from preamp.core.dtypes import HALF_DTYPES, dtype_name
from preamp.core.errors import bad_value
from preamp.optim.fused.base import Group, Signals, count_on_device
from preamp.optim.fused.lamb import Lamb


class FusedMixedPrecisionLamb(Lamb):
    """LAMB that keeps float32 copies of half parameters and never waits for the device.

    The formula is that of `FusedLAMB`. Learning rate and step counter are tensors on the device.
    With `torch.amp.GradScaler` overflow is decided there too: a skipped step changes nothing and
    is not counted. After the step the gradients are unscaled.

    State: ``exp_avg``, ``exp_avg_sq`` in float32 (float64 for float64 parameters), and
    ``master_param``, the float32 copy, for parameters of ``reduced_precision_dtype``. Copies are
    made at the first step, and are in ``state_dict()``.

    Args:
        params: Parameters or groups; the parameters of a group may differ in dtype.
        lr: Learning rate.
        step: Steps done already.
        bias_correction: Correct the moments for the number of steps.
        betas: Decay of the two moments.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        amsgrad: Must be ``False``.
        adam_w_mode: Add the decay to the update rather than to the gradient.
        grad_averaging: Weigh a new gradient by ``1 - betas[0]`` rather than by 1.
        max_grad_norm: Largest global norm of the unscaled gradients; 0 for no clipping.
        use_nvlamb: Use the trust ratio for tensors without weight decay too.
        reduced_precision_dtype: Parameters of this half dtype get a float32 copy.

    Raises:
        RuntimeError: ``amsgrad`` is set.
        ValueError: A negative number, betas that are not in [0, 1), or a
            ``reduced_precision_dtype`` that is not half.
    """

    keeps_copies = True
    _more_state = ("exp_avg", "exp_avg_sq")
    _settings = ("set_grad_none", "adam_w_mode", "use_nvlamb", "reduced_precision_dtype")
    _wide_state = frozenset({"exp_avg", "exp_avg_sq", "master_param"})

    reduced_precision_dtype: torch.dtype | None

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        step: int = 0,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,
        grad_averaging: bool = True,
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,
        reduced_precision_dtype: torch.dtype | None = None,
    ) -> None:
        if reduced_precision_dtype not in (*HALF_DTYPES, None):
            raise bad_value(
                f"FusedMixedPrecisionLamb got reduced_precision_dtype="
                f"{dtype_name(reduced_precision_dtype)}",
                "It is torch.float16, torch.bfloat16 or None",
                "Name the dtype of the parameters that need a float32 copy",
            )
        super().__init__(params, {**locals(), "set_grad_none": True}, more=("step",))

    def _count(self, group: Group, signals: Signals) -> torch.Tensor:
        return count_on_device(group, signals.found_inf)

    @property
    def _counts_on_device(self) -> bool:
        return True

    def _has_copy(self, param: torch.Tensor) -> bool:
        return param.dtype is self.reduced_precision_dtype
