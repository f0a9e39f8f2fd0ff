# SPDX-License-Identifier: BSD-3-Clause
"""What a step updates, as columns sorted into lists for ops, and how the next one knows them.

With thousands of parameters a step waits for Python, so rows that are alike are never looked at one
by one: those of a weight table are cut out of its columns, those of plain parameters are asked for
each kind of thing in one pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import is_, itemgetter
from typing import Any, cast

import torch

from preamp.core.tensors import (
    are_same,
    device_of,
    devices_of,
    dtype_of,
    kinds_of,
    stored_grad,
    with_gradients,
)
from preamp.kernels import Standing, Update
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
Entry = dict[str, Any]
"""An optimizer's state of one parameter."""

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
    # Whether it is known that all go into one batch; masters are neighbours then
    are_alike: bool = False

    @classmethod
    def of_rows(cls, rows: Iterable[Row]) -> Entries:
        """Turn rows into columns."""
        columns: list[list[Any]] = [*map(list, tuple(zip(*rows, strict=True)) or [()] * 5)]
        columns.append([None if t is None else t.table.lows[t.row] for t in columns[4]])
        wanted: Any = [c if any([v is not None for v in c]) else None for c in columns[2:]]
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
            halves_lead=self.twins is not None,
            stored=Stored(lows=cast("Any", self.lows)) if is_split else None,
        )

    def note_written(self) -> None:
        """The op has rounded masters into their half weights."""
        twins = cast("list[Twin] | None", self.twins)  # all or none of a batch are masters
        if twins is None:
            return
        table, start, stop = twins[0].table, twins[0].row, twins[0].row + len(twins)
        if self.are_alike or are_same(twins, table.twins[start:stop]):
            table.note_rounded(start, stop)
            return
        for twin in twins:
            twin.table.note_rounded(twin.row, twin.row + 1)

    def note_interrupted(self) -> None:
        """The op may have updated some of them: whoever ends the step rounds them again."""
        for twin in cast("list[Twin] | None", self.twins) or ():
            twin.table.note_master_changed(twin.row)


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
    kinds = kinds_of(dtype_of, params), kinds_of(dtype_of, grads), devices_of(params)
    are_alike = all([len(kind) == 1 for kind in kinds])
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
    return Entries(
        masters,
        grads,
        table.halves[start:stop],
        factors,
        [*table.twins[start:stop]],
        lows if table.is_split else None,
        table.are_alike,
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


_MOST_KEPT = 256
"""Batches of an optimizer; it needs one for each group and kind of parameters in a step."""


@dataclass(slots=True, eq=False)
class Kept:
    """What parameters were updated with in a step, for the next one to know it again.

    Tensors are referred to weakly: where a script moves or drops them, memory is free at once.
    """

    places: list[int] | None  # of the parameters in all state; ``None`` for all, in their order
    # The ``id`` of each tensor, by what a list is: ``"params"``, ``"keys"`` of all state,
    # ``"lows"``, and the keys of the state. An entry goes when one of its tensors dies.
    lists: dict[str, list[int]] = field(default_factory=dict[str, "list[int]"])
    # Weak references that see to that
    refs: dict[str, list[Any]] = field(default_factory=dict[str, "list[Any]"])
    dtypes: dict[str, torch.dtype | None] = field(default_factory=dict[str, "torch.dtype | None"])
    homes: Any = None  # a reference to where they were, if moments are kept in fewer bits
    numbers: list[int] = field(default_factory=list[int])  # of these, see `Stored`
    starts: list[int] = field(default_factory=list[int])
    standing: Standing | None = None  # from the second step on, while all is the same

    def is_same(self, name: str, column: Collection[Any] | None) -> bool:
        """Whether a list has the very tensors that were noted."""
        if column is None:
            return not self.refs.get(name)
        return list(map(id, column)) == self.lists.get(name)

    def note(self, name: str, column: Collection[Any] | None) -> None:
        """The update takes this list."""
        if not self.is_same(name, column):
            self.lists.pop(name, None)
            forget = partial(self.lists.pop, name)  # no function of Python, which Ctrl-C might end
            self.refs[name] = [weakref.ref(tensor, forget) for tensor in column or ()]
            if column is not None:
                self.lists[name] = list(map(id, column))
            self.standing = None

    def column(
        self, states: Sequence[Entry], key: str, dtype: torch.dtype | None
    ) -> list[torch.Tensor] | None:
        """State of one kind as it is, ``None`` unless all of it is there and of ``dtype``."""
        try:
            found: Any = list(map(itemgetter(key), states))
            if self.dtypes.get(key) is dtype and self.is_same(key, found):
                return found
            if set(map(dtype_of, found)) == {dtype}:
                self.dtypes[key] = dtype
                self.note(key, found)
                return found
        except (KeyError, AttributeError):  # one has none, or None
            pass
        return None


def kept_of(
    optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> tuple[Kept, list[Entry]]:
    """What is kept of a step that updated these ``params``, and their state dicts.

    To look up a dict takes a call of Python, which ``torch.Tensor.__hash__`` is: so they are
    found by their places, while the keys of the state are the same.
    """
    state: dict[Any, Entry] = optimizer.state
    every: dict[Hashable, Kept] = vars(optimizer).setdefault("_kept_lists", {})
    key = id(params[0]), len(params)
    kept = every.get(key)
    if kept and kept.is_same("params", params):
        if kept.places is None and are_same(state, params):
            return kept, list(state.values())
        if kept.places is not None and kept.is_same("keys", state):
            states = list(state.values())
            return kept, [states[place] for place in kept.places]
    own = [state[param] for param in params]  # made where there is none
    places = None
    if not are_same(state, params):
        place_of = {id(key): place for place, key in enumerate(state)}
        places = [place_of[id(param)] for param in params]
    if len(every) > _MOST_KEPT:
        del every[next(iter(every))]
    kept = every[key] = Kept(places)
    kept.note("params", params)
    if places is not None:  # else its keys are the parameters
        kept.note("keys", state)
    return kept, own
