# SPDX-License-Identifier: BSD-3-Clause
"""What a step has to do: parameters with their gradients, sorted into lists for the op table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from preamp.core.tensors import stored_grad
from preamp.kernels import Update
from preamp.optim.master_parameter import leaf_of, pair_of
from preamp.optim.twin import Twin


class Entry(NamedTuple):
    """One parameter of a step.

    Attributes:
        param: What is updated.
        grad: Its gradient; of a master the model's half one, where that is all there is.
        half: What gets the new value rounded as well, or ``None``.
        factor: float32 scalar that unscales ``grad``, or ``None``.
        twin: Of a master.
    """

    param: torch.Tensor
    grad: torch.Tensor
    half: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    twin: Twin | None = None

    @property
    def owner(self) -> torch.Tensor:
        """The model's parameter."""
        return leaf_of(self.param)


def entry_of(param: torch.Tensor) -> Entry | None:
    """The entry of a parameter that has a gradient.

    A master's float32 gradient is not made for it: the update unscales the half one on the way,
    and rounds the new master into the half weight while it is at hand.
    """
    twin = pair_of(param)
    if twin is None:
        grad = param.grad
        return None if grad is None else Entry(param, grad)
    pending = twin.pending
    half = twin.half if twin.held.part is None else twin.held.own(twin.half)
    if pending is not None and stored_grad(param) is None:
        half_grad, factor = pending
        if half is not twin.half:
            half_grad = twin.held.own(half_grad)
        return Entry(param, half_grad, half, factor, twin)
    grad = param.grad
    return None if grad is None else Entry(param, grad, half, None, twin)


@dataclass(frozen=True, slots=True)
class Batch:
    """Lists for one call of an op: parameters of one dtype on one device, and what goes along.

    Attributes:
        params: What is updated.
        grads: Of one dtype.
        halves: Of one dtype, or all ``None``.
        factor: What unscales all of the gradients, or ``None``.
        twins: Of those that are masters.
    """

    params: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    grads: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    halves: list[torch.Tensor | None] = field(default_factory=list["torch.Tensor | None"])
    factor: torch.Tensor | None = None
    twins: list[Twin] = field(default_factory=list[Twin])

    @property
    def owners(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return [leaf_of(param) for param in self.params]

    def update(
        self,
        *,
        step: int | torch.Tensor = 1,
        inv_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        norms: torch.Tensor | None = None,
    ) -> Update:
        """What the op is told.

        Args:
            step: See `Update`.
            inv_scale: Multiplies the gradients in addition to `factor`.
            found_inf: See `Update`.
            norms: See `Update`.
        """
        both = inv_scale if self.factor is None else self.factor
        if inv_scale is not None and self.factor is not None:
            both = self.factor * inv_scale.to(self.factor.device)
        has_halves = any(half is not None for half in self.halves)
        halves = self.halves if has_halves else None
        return Update(step=step, inv_scale=both, found_inf=found_inf, halves=halves, norms=norms)

    def note_written(self) -> None:
        """The op has rounded the masters into their half weights."""
        for twin in self.twins:
            twin.note_rounded()


def batches(
    entries: Iterable[Entry], apart: Callable[[torch.Tensor], Hashable] = lambda _: None
) -> list[Batch]:
    """Sort entries into lists for ops.

    Args:
        entries: Parameters of any dtype and device.
        apart: Parameters for which this differs come into different batches.
    """
    found: dict[Hashable, Batch] = {}
    latest: Hashable = None
    batch = Batch()
    for param, grad, half, factor, twin in entries:
        half_dtype = None if half is None else half.dtype
        key = (param.device, param.dtype, grad.dtype, half_dtype, id(factor), apart(param))
        if key != latest:  # most follow one of their kind, and comparing is cheaper than hashing
            latest, batch = key, found.setdefault(key, Batch(factor=factor))
        batch.params.append(param)
        batch.grads.append(grad)
        batch.halves.append(half)
        if twin is not None:
            batch.twins.append(twin)
    return list(found.values())
