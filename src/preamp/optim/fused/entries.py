# SPDX-License-Identifier: BSD-3-Clause
"""What a step has to do: parameters with their gradients as columns, sorted for the op table."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch

from preamp.core.tensors import device_of, dtype_of, stored_grad
from preamp.kernels import Update
from preamp.optim.master_parameter import MASTER_KINDS, leaves_of
from preamp.optim.table import Twin


@dataclass(slots=True, eq=False)
class Entries:
    """Parameters of a step that have a gradient, as columns.

    Attributes:
        params: What is updated.
        grads: Their gradients; of a master the model's half one, where that is all there is.
        halves: What gets the new value rounded as well, or ``None``.
        factors: float32 scalars that unscale gradients, or ``None``.
        twins: Of those that are masters.
        are_alike: Whether all go into one batch, as far as is known already.
    """

    params: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    grads: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    halves: list[torch.Tensor | None] = field(default_factory=list["torch.Tensor | None"])
    factors: list[torch.Tensor | None] = field(default_factory=list["torch.Tensor | None"])
    twins: list[Twin | None] = field(default_factory=list["Twin | None"])
    are_alike: bool = False

    def __len__(self) -> int:
        """How many there are."""
        return len(self.params)

    @property
    def owners(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return leaves_of(self.params)

    def kinds(self) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """A parameter and its gradient for each combination of dtypes and layout."""
        if self.are_alike:
            return ((self.params[0], self.grads[0]),)
        pairs = zip(self.params, self.grads, strict=True)
        return {(p.dtype, g.dtype, g.layout): (p, g) for p, g in pairs}.values()

    def add(
        self,
        param: torch.Tensor,
        grad: torch.Tensor,
        half: torch.Tensor | None = None,
        factor: torch.Tensor | None = None,
        twin: Twin | None = None,
    ) -> None:
        """Add a row."""
        self.params.append(param)
        self.grads.append(grad)
        self.halves.append(half)
        self.factors.append(factor)
        self.twins.append(twin)


def joined(every: Iterable[Entries]) -> Entries:
    """The rows of all."""
    whole = Entries()
    for one in every:
        whole.params += one.params
        whole.grads += one.grads
        whole.halves += one.halves
        whole.factors += one.factors
        whole.twins += one.twins
    return whole


def entries_of(params: Sequence[Any]) -> Entries:
    """The entries of those ``params`` that have a gradient.

    A master's float32 gradient is not made for it: the update unscales the half one on the way,
    and rounds the new master into the half weight while it is at hand.
    """
    return _consecutive_rows(params) or _one_by_one(params)


def _consecutive_rows(params: Sequence[Any]) -> Entries | None:
    """The entries of masters that are neighbours in a table and alike, as in most steps."""
    twin: Twin | None = params[0].twin if params and type(params[0]) in MASTER_KINDS else None
    if twin is None:
        return None
    table, start, stop = twin.table, twin.row, twin.row + len(params)
    masters = table.masters[start:stop]
    if len(masters) != len(params) or table.has_parts or not all(map(is_, params, masters)):
        return None
    table.complete()
    records, n = table.records[start:stop], stop - start
    record = records[0]
    if record is None or record.factor is None or table.is_open or records.count(record) != n:
        return None
    grads = [grad for grad in table.grads[start:stop] if grad is not None]
    factors: list[torch.Tensor | None] = [record.factor] * n
    twins: list[Twin | None] = [*table.twins[start:stop]]
    are_alike = table.are_alike and len(set(map(dtype_of, grads))) == 1
    return Entries([*masters], grads, [*table.halves[start:stop]], factors, twins, are_alike)


def _one_by_one(params: Sequence[Any]) -> Entries:
    found = Entries()
    latest = None
    for param in params:
        twin: Twin | None = param.twin if type(param) in MASTER_KINDS else None
        if twin is None:
            grad = param.grad
            if grad is not None:
                found.add(param, grad)
            continue
        table = twin.table
        if table is not latest:
            table.complete()
            latest = table
        half, record, made = twin.half, table.records[twin.row], stored_grad(param)
        factor = None if record is None or made is not None or table.is_open else record.factor
        grad = made if factor is None else table.grads[twin.row]
        if table.has_parts:
            half = twin.held.own(half)
            if factor is None:
                grad = param.grad
            elif grad is not None:
                grad = twin.held.own(grad)
        if grad is not None:
            found.add(param, grad, half, factor, twin)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Lists for one call of an op: parameters of one dtype on one device, and what goes along.

    Attributes:
        params: What is updated.
        grads: Of one dtype.
        halves: Of one dtype, or ``None`` if nothing is rounded.
        factor: What unscales all of the gradients, or ``None``.
        twins: Of those that are masters.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    halves: list[torch.Tensor | None] | None
    factor: torch.Tensor | None
    twins: list[Twin | None]

    @property
    def owners(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return leaves_of(self.params)

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
        return Update(
            step=step, inv_scale=both, found_inf=found_inf, halves=self.halves, norms=norms
        )

    def note_written(self) -> None:
        """The op has rounded the masters into their half weights."""
        first, last = self.twins[0], self.twins[-1]
        if first is None or last is None:
            return  # all or none of a batch are masters
        n, table = len(self.twins), first.table
        if last.row - first.row == n - 1 and all(map(is_, self.twins, table.twins[first.row :])):
            table.note_rounded(first.row, first.row + n)
            return
        for twin in self.twins:
            if twin is not None:
                twin.table.note_rounded(twin.row, twin.row + 1)


def batches(
    entries: Entries, apart: Callable[[list[torch.Tensor]], Sequence[Hashable]] | None = None
) -> list[Batch]:
    """Sort entries into lists for ops.

    Args:
        entries: Parameters of any dtype and device.
        apart: Returns a column; parameters for which it differs come into different batches.
    """
    if not entries:
        return []
    if entries.are_alike and apart is None:
        return [_batch(entries)]
    keys: list[list[Hashable]] = [
        list(map(device_of, entries.params)),
        list(map(dtype_of, entries.params)),
        list(map(dtype_of, entries.grads)),
        [None if half is None else half.dtype for half in entries.halves],
        list(map(id, entries.factors)),
    ]
    if apart is not None:
        keys.append(list(apart(entries.params)))
    if all([len(set(column)) == 1 for column in keys]):
        return [_batch(entries)]
    found: dict[Hashable, Entries] = {}
    rows = zip(
        entries.params, entries.grads, entries.halves, entries.factors, entries.twins, strict=True
    )
    for key, row in zip(zip(*keys, strict=True), rows, strict=True):
        found.setdefault(key, Entries()).add(*row)
    return list(map(_batch, found.values()))


def _batch(alike: Entries) -> Batch:
    halves = None if alike.halves[0] is None else alike.halves
    return Batch(alike.params, alike.grads, halves, alike.factors[0], alike.twins)
