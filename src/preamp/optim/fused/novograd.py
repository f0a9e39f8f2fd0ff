# SPDX-License-Identifier: BSD-3-Clause
"""FusedNovoGrad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from preamp.core.errors import bad_value
from preamp.core.tensors import local_of
from preamp.kernels.rules import NovoGradRule
from preamp.kernels.stored import Format
from preamp.optim.fused.base import FusedOptimizer, Group, rule_of

NO_NORM_YET = -1.0
"""What ``exp_avg_sq`` holds before the first step, see `preamp.kernels.rules.NovoGradRule`."""

APEX_NORM_DTYPES = (torch.float16, torch.float32)
"""Apex keeps the norms in the group: one tensor for the parameters of each of these dtypes."""


class FusedNovoGrad(FusedOptimizer):
    """NovoGrad, for float16, bfloat16, float32 and float64 parameters.

    Adam with one second moment per tensor, kept as a norm:
    ``v = sqrt(beta2 * v**2 + (1 - beta2) * |g|**2)``, starting at the first ``|g|``. Then
    ``m = beta1 * m + beta3 * g``, ``p -= lr * (m / v + weight_decay * p)``, both corrected for the
    number of steps; or with ``reg_inside_moment`` ``m = beta1 * m + beta3 * (g / v +
    weight_decay * p)``, ``p -= lr * m``.

    State: ``exp_avg`` in the parameter's dtype, ``exp_avg_sq`` a 0-dim float32 norm, negative
    before the first step. Files written by Apex, where the norms lie in
    ``group["exp_avg_sq"]``, are read too. The step counter is ``group["step"]``. Does not
    synchronise.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        bias_correction: Correct moment and norm for the number of steps.
        betas: Decay of the moment and of the norm.
        eps: Added to the denominator.
        weight_decay: Weight decay.
        amsgrad: Must be ``False``.
        reg_inside_moment: Normalise and decay before the moment rather than after.
        grad_averaging: Weigh a new gradient by ``1 - betas[0]`` rather than by 1.
        norm_type: 2 for the L2 norm, 0 for the largest magnitude, which is averaged plainly.
        init_zero: Start the norm at 0 rather than at the first gradient's.
        set_grad_none: Whether ``zero_grad()`` drops gradients; else it fills them with zeros.

    Raises:
        RuntimeError: ``amsgrad`` is set, or ``norm_type`` is neither 2 nor 0.
        ValueError: A negative number, or betas that are not in [0, 1).
    """

    _options = (
        *("lr", "bias_correction", "betas", "eps", "weight_decay"),
        *("grad_averaging", "norm_type", "init_zero"),
    )
    _more_state = ("exp_avg_sq",)
    _settings = ("set_grad_none", "moment_mode")
    _wide_state = frozenset({"exp_avg_sq"})
    moments: ClassVar = {"exp_avg": Format.SIGNED}

    moment_mode: int

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        reg_inside_moment: bool = False,
        grad_averaging: bool = True,
        norm_type: int = 2,
        init_zero: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        super().__init__(params, {**locals(), "moment_mode": 0 if reg_inside_moment else 1})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, here or in Apex.

        Raises:
            ValueError: Its groups do not match those of this optimizer, or the norms of a file
                from Apex do not match its parameters.
        """
        super().load_state_dict(_norms_to_state(state_dict, self.param_groups))

    def _started(
        self, key: str, param: torch.Tensor, dtype: torch.dtype, group: Group
    ) -> torch.Tensor:
        start = 0.0 if group["init_zero"] else NO_NORM_YET
        return local_of(param).new_full((), start, dtype=dtype)

    def _rule(self, group: Group) -> NovoGradRule:
        return rule_of(
            NovoGradRule,
            group,
            decays_inside_moment=self.moment_mode == 0,
            uses_max_norm=group["norm_type"] == 0,
        )


def _norms_to_state(given: dict[str, Any], own: Sequence[Group]) -> dict[str, Any]:
    """Move the norms of a file from Apex to the parameters that have a first moment."""
    state = dict(given["state"])
    groups: list[Group] = []
    for group, mine in zip(given["param_groups"], own, strict=False):
        rest = {key: value for key, value in group.items() if key != "exp_avg_sq"}
        groups.append(rest)
        per_dtype: Sequence[torch.Tensor] = group.get("exp_avg_sq", ())
        for dtype, norms in zip(APEX_NORM_DTYPES, per_dtype, strict=False):
            numbers = [
                number
                for number, param in zip(group["params"], mine["params"], strict=False)
                if param.dtype is dtype and "exp_avg" in state.get(number, {})
            ]
            if len(numbers) != norms.numel():
                raise bad_value(
                    f"The loaded group has {norms.numel()} norms for {len(numbers)} {dtype} "
                    "parameters with a moment",
                    "group['exp_avg_sq'] holds the norms of the float16 parameters, then those of "
                    "the float32 ones, one for each parameter that was updated",
                    "Build the model and its groups as they were when the file was written",
                )
            for number, norm in zip(numbers, norms.reshape(-1), strict=True):
                state[number] = {**state[number], "exp_avg_sq": norm.clone()}
    groups += given["param_groups"][len(groups) :]  # too many: torch refuses them
    return {**given, "state": state, "param_groups": groups}
