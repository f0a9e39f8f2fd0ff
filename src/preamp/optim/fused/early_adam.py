# SPDX-License-Identifier: BSD-3-Clause
"""What belongs to the FusedAdam of early 2019 alone: its options, arguments and clipping.

It took gradients, scale and norms as arguments of ``step``, because the flat ``FP16_Optimizer``
around it kept them, and wrote the half parameters along with the float32 ones.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.errors import bad_state, bad_value
from preamp.core.splits import Splits
from preamp.kernels import Ops
from preamp.optim.fused.base import Group, scalar_on
from preamp.optim.fused.checks import refusal
from preamp.optim.fused.entries import Entries, Row
from preamp.optim.fused.norms import global_norm
from preamp.optim.table import pair_of

CLIP_EPS = 1e-6
"""Added to a norm before it is divided by the largest one allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyOptions:
    """The constructor's keywords that today's FusedAdam does not have."""

    eps_inside_sqrt: bool | None = None  # divide by ``sqrt(v + eps)``
    max_grad_norm: float | None = None  # clip each group to this norm; 0 for no clipping
    use_mt: bool | None = None  # chose between kernels of equal results
    amp_scale_adjustment: float | None = None  # multiplied the loss scale of an amp that is no more

    @property
    def given(self) -> list[str]:
        """The names of those that were passed."""
        return [f.name for f in fields(self) if getattr(self, f.name) is not None]

    def check(self, **todays: bool) -> None:
        """Raise ``ValueError`` if ``todays`` options, which the early formula lacks, are set."""
        if not self.given:
            return
        clashing = [name for name, is_set in todays.items() if is_set]
        if clashing:
            raise bad_value(
                f"FusedAdam got {', '.join(self.given)} of the optimizer of early "
                f"2019 together with {', '.join(clashing)}",
                "That optimizer decays the parameter, on the host's step count, and has no "
                "masters of its own",
                f"Leave out {' and '.join(clashing)}, or clip with preamp.clip_grad_norm_ "
                "and use today's formula",
            )
        if self.amp_scale_adjustment not in (None, 1.0):
            raise bad_value(
                f"FusedAdam got amp_scale_adjustment={self.amp_scale_adjustment!r}",
                "Gradients reach the optimizer unscaled, so only 1.0 has a meaning",
                "Leave it out, and scale the loss instead",
            )


@dataclass(frozen=True, slots=True)
class EarlyArguments:
    """The arguments of ``step`` that today's FusedAdam refuses."""

    # Gradients in place of the parameters' own: a flat sequence for a single group, or one sequence
    # per group. ``None`` stands for the parameter's own.
    grads: Any = None
    output_params: Any = None  # tensors that get the rounded parameters, in the same form
    scale: float | torch.Tensor | None = None  # gradients are divided by it
    # L2 norm of the scaled gradients of each group
    grad_norms: Sequence[float | torch.Tensor] | None = None

    def given(self) -> dict[str, Any]:
        """Those that were passed, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def entries(self, groups: Sequence[Group]) -> list[Entries]:
        """For each group the entries of the parameters that have a gradient from somewhere.

        Raises ``ValueError`` if lists, tensors or norms do not match the groups, or a shape its
        parameter's.
        """
        if self.grad_norms is not None and len(self.grad_norms) != len(groups):
            raise _mismatch(
                f"grad_norms of length {len(self.grad_norms)}",
                f"There are {len(groups)} groups",
                "Pass one norm per group",
            )
        grads = _per_group("grads", self.grads, groups)
        outputs = _per_group("output_params", self.output_params, groups)
        found: list[Entries] = []
        for group, group_grads, group_outputs in zip(groups, grads, outputs, strict=True):
            rows: list[Row] = []
            for param, grad, out in zip(group["params"], group_grads, group_outputs, strict=True):
                grad = param.grad if grad is None else grad
                _check_shapes(param, grads=grad, output_params=out)
                twin = None if out is not None else pair_of(param)
                if grad is not None and twin is not None:
                    twin.table.follow()
                    rows.append((param, grad, twin.half, None, twin))
                elif grad is not None:
                    rows.append((param, grad, out, None, None))
            found.append(Entries.of_rows(rows))
        return found

    def select_early(
        self, groups: Sequence[Group], *, is_early_kind: bool, counts_per_parameter: bool
    ) -> bool:
        """Whether the step follows the formula of early 2019.

        Refuses formula, arguments and state that do not belong together: ``RuntimeError`` if the
        arguments belong to the other formula, `PreampStateError` if the state does.
        """
        is_early = is_early_kind or self.grads is not None
        names = ", ".join(self.given())
        if names and not is_early:
            raise refusal(
                f"FusedAdam.step() got {names}",
                "Without grads they belong to the FusedAdam of early 2019 alone",
                "Leave them out, or select that one by FusedAdam(..., max_grad_norm=0.0)",
            )
        counts_per_group = any("step" in group for group in groups)
        if counts_per_group if is_early else counts_per_parameter:
            here, there = ("early 2019", "today") if is_early else ("today", "early 2019")
            raise bad_state(
                f"This step of FusedAdam would follow the formula of {here}, but its state has "
                f"the step counters of the formula of {there}",
                "An optimizer keeps to one formula; today's counts steps in the group, that of "
                "early 2019, like torch.optim.Adam, for each parameter",
                "Call step always with grads or never, and load a file into the optimizer that "
                "wrote it",
            )
        return is_early

    def inverse_scale(
        self, index: int, entries: Entries, max_norm: float, ops: Ops
    ) -> torch.Tensor | None:
        """What unscales and clips a group's gradients.

        ``1 / (scale * max(1, (norm / scale + 1e-6) / max_norm))``; each group is clipped by
        itself. Does not synchronise.
        """
        scale = 1.0 if self.scale is None else self.scale
        if max_norm <= 0 and isinstance(scale, (int, float)) and scale == 1.0:
            return None
        param = entries.params[0]
        dtype, device = math_dtype(param.dtype), param.device
        combined = scalar_on(scale, dtype, device)
        if max_norm > 0:
            given = self.grad_norms
            norm = global_norm([entries], ops, Splits()) if given is None else given[index]
            norm = scalar_on(norm, dtype, device)
            clip = (norm / combined + CLIP_EPS) / max_norm
            combined = torch.where(clip > 1, clip * combined, combined)
        return combined.reciprocal()


def _per_group(name: str, value: Any, groups: Sequence[Group]) -> list[list[Any]]:
    """Bring any of the accepted forms into one list per group, as long as its parameters."""
    if value is None:
        return [[None] * len(group["params"]) for group in groups]
    items: list[Any] = list(cast("Iterable[Any]", value))
    is_nested = bool(items) and isinstance(items[0], (list, tuple, Generator))
    lists = [list(cast("Iterable[Any]", item)) for item in items] if is_nested else [items]
    lengths, wanted = [len(item) for item in lists], [len(group["params"]) for group in groups]
    if lengths != wanted:
        raise _mismatch(
            f"{name} of lengths {lengths}",
            f"The groups have {wanted} parameters",
            f"Pass {name} as one list per group, or flat if there is a single group",
        )
    return lists


def _check_shapes(param: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != param.shape:
            raise _mismatch(
                f"a tensor of shape {tuple(tensor.shape)} in {name}",
                f"Its parameter has the shape {tuple(param.shape)}",
                f"Pass {name} in the order and shapes of the groups' parameters",
            )


def _mismatch(got: str, allowed: str, do: str) -> ValueError:
    return bad_value(f"FusedAdam.step() got {got}", allowed, do)
