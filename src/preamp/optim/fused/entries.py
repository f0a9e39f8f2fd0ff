# SPDX-License-Identifier: BSD-3-Clause
"""What a step updates: parameters with their gradients, as columns, sorted into lists for ops.

With thousands of parameters a step waits for Python, so rows that are alike are never looked at one
by one: those of a weight table are cut out of its columns, those of plain parameters are asked for
each kind of thing in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from typing import Any, cast

import torch

from preamp.core.tensors import device_of, dtype_of, kinds_of, stored_grad, with_gradients
from preamp.kernels import Update
from preamp.kernels.stored import Stored
from preamp.optim.gradients import State
from preamp.optim.master_parameter import MASTER_KINDS, leaves_of
from preamp.optim.table import Twin

Row = tuple[
    torch.Tensor,  # what is updated
    torch.Tensor,  # its gradient; of a master the model's half one, where that is all there is
    torch.Tensor | None,  # what gets the new value rounded as well
    torch.Tensor | None,  # a float32 scalar that unscales the gradient
    Twin | None,  # of a master
]
Apart = Callable[[list[torch.Tensor]], Sequence[Hashable]]
"""Says of parameters in which of several calls each is to be updated."""


@dataclass(slots=True, eq=False)
class Entries:
    """Parameters of a step that have a gradient.

    A column that is empty in every row is ``None``. What `batches` returns is alike in all rows, so
    that one call of an op can take it.
    """

    params: list[torch.Tensor]
    grads: list[torch.Tensor]
    halves: list[torch.Tensor | None] | None = None
    factors: list[torch.Tensor | None] | None = None
    twins: list[Twin | None] | None = None
    lows: list[torch.Tensor | None] | None = None  # of split masters what is beside half weights
    are_alike: bool = False  # whether all go into one batch, as far as is known already

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> Entries:
        """Turn rows into columns."""
        columns: list[list[Any]] = [*map(list, tuple(zip(*rows, strict=True)) or [()] * 5)]
        columns.append([None if t is None else t.table.lows[t.row] for t in columns[4]])
        wanted: Any = [c if any(map(_is_there, c)) else None for c in columns[2:]]
        return cls(columns[0], columns[1], *wanted)

    def rows(self) -> Iterator[Row]:
        """The rows, one by one."""
        columns = self.params, self.grads, self.halves, self.factors, self.twins
        nothing = [None] * len(self.params)
        return cast("Any", zip(*[c if c is not None else nothing for c in columns], strict=True))

    @property
    def owners(self) -> list[torch.Tensor]:
        """The model's parameters."""
        return leaves_of(self.params)

    @property
    def targets(self) -> list[torch.Tensor]:
        """What ops update: parameters; in place of split masters their half weights."""
        if self.lows is None or self.halves is None:
            return self.params
        if not any(map(is_, self.lows, repeat(None))):
            return cast("list[torch.Tensor]", self.halves)
        return [
            param if half is None or low is None else half
            for param, half, low in zip(self.params, self.halves, self.lows, strict=True)
        ]

    def update(
        self,
        *,
        step: int | torch.Tensor = 1,
        inv_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> Update:
        """What the op is told of a batch; ``inv_scale`` comes in addition to its factor."""
        factor = None if self.factors is None else self.factors[0]
        both = inv_scale if factor is None else factor
        if inv_scale is not None and factor is not None:
            both = factor * inv_scale.to(factor.device)
        is_split = self.lows is not None
        return Update(
            step=step,
            inv_scale=both,
            found_inf=found_inf,
            halves=None if is_split else self.halves,
            halves_lead=self.twins is not None,  # else a script's places for results
            stored=Stored(lows=cast("Any", self.lows)) if is_split else None,
        )

    def note_written(self) -> None:
        """The op has rounded masters into their half weights."""
        twins = cast("list[Twin] | None", self.twins)  # all or none of a batch are masters
        if twins is None:
            return
        first, n = twins[0], len(twins)
        if twins[-1].row - first.row == n - 1 and all(
            map(is_, twins, first.table.twins[first.row :])
        ):
            first.table.note_rounded(first.row, first.row + n)
            return
        for twin in twins:
            twin.table.note_rounded(twin.row, twin.row + 1)

    def note_interrupted(self) -> None:
        """The op may have updated some of them: whoever ends the step rounds them again."""
        for twin in cast("list[Twin] | None", self.twins) or ():
            if not twin.table.is_split:
                twin.table.note_interrupted(twin.row)


def _is_there(value: object) -> bool:
    return value is not None


def entries_of(params: Sequence[Any]) -> Entries:
    """The entries of those ``params`` that have a gradient.

    A master's float32 gradient is not made for it: the update unscales the half one on the way,
    and rounds the new master into the half weight while it is at hand.
    """
    if not set(map(type, params)) & MASTER_KINDS:
        return _of_plain(params)
    return _of_neighbours(params) or Entries.of_rows(_rows_of(params))


def _of_plain(given: Sequence[torch.Tensor]) -> Entries:
    """The entries of parameters of which none is a master."""
    params, grads = with_gradients(given)
    columns = (dtype_of, params), (dtype_of, grads), (device_of, params)
    are_alike = all([len(kinds_of(kind, column)) == 1 for kind, column in columns])
    return Entries(params, grads, are_alike=are_alike)


def _of_neighbours(params: Sequence[Any]) -> Entries | None:
    """The entries of masters that are neighbours in a table and alike, as in most steps."""
    twin: Twin | None = params[0].twin if type(params[0]) in MASTER_KINDS else None
    if twin is None:
        return None
    table, start, stop = twin.table, twin.row, twin.row + len(params)
    masters = table.masters[start:stop]
    if len(masters) != len(params) or not all(map(is_, params, masters)):
        return None
    table.follow()  # a script's hook may have written to masters within the step
    gradients = table.gradients
    gradients.take_in()
    found = gradients.seen[start:stop]
    if not (gradients.state is State.HALF and table.are_alike) or any(
        map(is_, found, repeat(None))
    ):
        return None
    grads = cast("list[torch.Tensor]", found)
    lows = table.lows[start:stop]
    factors: list[torch.Tensor | None] = [gradients.factor_on(grads[0].device)] * len(grads)
    are_alike = table.are_alike and len(set(map(dtype_of, grads))) == 1
    return Entries(
        [*masters],
        grads,
        [*table.halves[start:stop]],
        factors,
        [*table.twins[start:stop]],
        lows if table.is_split else None,
        are_alike,
    )


def _rows_of(params: Sequence[Any]) -> Iterator[Row]:
    latest = None
    for param in params:
        twin: Twin | None = param.twin if type(param) in MASTER_KINDS else None
        if twin is None:
            grad = param.grad
            if grad is not None:
                yield param, grad, None, None, None
            continue
        table, gradients = twin.table, twin.table.gradients
        if table is not latest:
            table.follow()
            gradients.take_in()
            latest = table
        is_half = gradients.state is State.HALF
        grad = gradients.seen[twin.row] if is_half else stored_grad(param)
        if grad is not None:
            factor = gradients.factor_on(grad.device) if is_half else None
            yield param, grad, twin.half, factor, twin


def batches(entries: Entries, apart: Apart | None = None) -> list[Entries]:
    """Sort entries into lists for ops, by dtype, device and the column that ``apart`` returns."""
    if not entries.params:
        return []
    if entries.are_alike and apart is None:
        return [entries]
    targets = entries.targets
    keys: list[list[Hashable]] = [
        list(map(device_of, targets)),
        list(map(dtype_of, targets)),
        list(map(dtype_of, entries.grads)),
    ]
    if entries.halves is not None:
        keys.append([None if half is None else half.dtype for half in entries.halves])
    if entries.factors is not None:
        keys.append(list(map(id, entries.factors)))
    if entries.lows is not None:
        keys.append([low is None for low in entries.lows])
    if apart is not None:
        keys.append(list(apart(entries.params)))
    if all([len(set(column)) == 1 for column in keys]):
        return [entries]
    found: dict[Hashable, list[Row]] = {}
    for row, key in zip(entries.rows(), zip(*keys, strict=True), strict=True):
        found.setdefault(key, []).append(row)
    return list(map(Entries.of_rows, found.values()))
