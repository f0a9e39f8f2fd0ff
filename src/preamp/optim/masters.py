# SPDX-License-Identifier: BSD-3-Clause
"""The masters of one optimizer, and their exchange with its ``param_groups``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

from preamp.core.dtypes import is_half
from preamp.kernels import Ops
from preamp.optim.gradients import Rewriting
from preamp.optim.master_parameter import MasterParameter, is_master
from preamp.optim.table import Twin, WeightTable
from preamp.policy.storage import FULL, Storage

Group = dict[str, Any]
NameOf = Callable[[torch.Tensor], str]


class Weights:
    """Half weights, in a table for each set of optimizers that share them: one master each."""

    def __init__(
        self, ops: Ops, name_of: NameOf, *, ignores_rewriting: bool = False, storage: Storage = FULL
    ) -> None:
        """Start without weights; see `Rewriting`, and `WeightTable.pack`."""
        self._ops = ops
        self._storage = storage
        self._rewriting = Rewriting(is_ignored=ignores_rewriting)
        self._name_of = name_of
        self._twins: dict[int, Twin] = {}  # by id of the half parameter
        self._tables: dict[frozenset[int], WeightTable] = {}
        self.changes = 0  # differs once an optimizer's tables may be others

    def tables_of(self, owner: int) -> list[WeightTable]:
        """The tables of one optimizer's weights; at most one if it shares none."""
        return [table for owners, table in self._tables.items() if owner in owners and table]

    def row(self, half: Any, original: torch.Tensor | None, owner: int) -> Twin:
        """The row of a half parameter that ``owner`` updates, made if it is new."""
        twin = self._twins.get(id(half))
        self.changes += 1
        if twin is None:
            data = half.detach() if original is None else original
            if self._storage.place == "host":
                data = data.cpu()
            data = data.float()
            twin = self._twins[id(half)] = Twin(half, data, self._name_of(half))
            self._table(frozenset((owner,))).add(twin)
            # Else the half weight is that already, and a forward may have saved it.
            if twin.table.packs and original is not None:
                twin.table.round((twin.row,))
        elif owner not in twin.table.owners:
            twin.table.hand_over(twin, self._table(twin.table.owners | {owner}))
        return twin

    def clear(self) -> None:
        """Hold nothing any more, rows and tables not each other."""
        for table in self._tables.values():
            for column in (table.twins, table.halves, table.masters, table.kept, table.lows):
                column.clear()
            table.gradients.clear()
        self._twins.clear()
        self._tables.clear()
        self.changes += 1

    def _table(self, owners: frozenset[int]) -> WeightTable:
        if owners not in self._tables:
            self._tables[owners] = WeightTable(self._ops, owners, self._rewriting, self._storage)
        return self._tables[owners]


class Masters:
    """One optimizer's share of `Weights`.

    The optimizer's group dicts, their ``params`` lists and its ``state`` keep their identity:
    schedulers and optimizers hold references to them. Only list entries are exchanged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, weights: Weights) -> None:
        """Start without masters; `adopt` makes them."""
        self._optimizer = optimizer
        self._weights = weights
        self._by_half: dict[int, Twin] = {}
        self._known: list[list[Any]] = []  # the parameters of each group, as last adopted
        self._tables: tuple[int, list[WeightTable]] = (-1, [])  # as of which changes of `Weights`

    @property
    def tables(self) -> list[WeightTable]:
        """Where the optimizer's rows are."""
        if self._tables[0] != self._weights.changes:
            found = self._weights.tables_of(id(self)) if self._by_half else []
            self._tables = self._weights.changes, found
        return self._tables[1]

    def __iter__(self) -> Iterator[Twin]:
        """Iterate over the rows in the order they were made."""
        return iter(self._by_half.values())

    def __len__(self) -> int:
        """How many masters there are."""
        return len(self._by_half)

    def of_half(self, half: torch.Tensor) -> Twin | None:
        """Return the row of a model parameter, or ``None``."""
        return self._by_half.get(id(half))

    def adopt(self, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        """Give every trainable half parameter in the optimizer a master, if it has none.

        Called again before each backward and step: a parameter that was frozen at first gets its
        master when it is unfrozen. ``originals`` are float32 values from before the cast, by
        ``id(parameter)``, whose storage becomes the master's; without, the half value is widened.
        """
        groups = self._optimizer.param_groups
        self._known += [[] for _ in groups[len(self._known) :]]
        for place, group in enumerate(groups):
            params: list[Any] = group["params"]
            known = self._known[place]
            if known and len(params) == len(known) and all(map(is_, params, known)):
                continue
            for index, param in enumerate(params):
                if not is_master(param) and is_half(param) and param.requires_grad:
                    params[index] = self._adopt_one(param, (originals or {}).get(id(param)))
            # A frozen half parameter may be unfrozen, so its group is looked through each time.
            self._known[place] = [] if any(map(is_half, params)) else params.copy()

    def _adopt_one(self, half: Any, original: torch.Tensor | None) -> MasterParameter:
        twin = self._by_half[id(half)] = self._weights.row(half, original, id(self))
        state: dict[Any, Any] = self._optimizer.state
        _move_state(state, half, twin.master)
        if twin.master in state:
            cast_state(state[twin.master], twin.master)
        return twin.master

    def release(self) -> None:
        """Put the model parameters back into the groups, and the state under them.

        May be called again if it was interrupted.
        """
        for table in self.tables:
            table.make()  # a script may keep masters
        state: dict[Any, Any] = self._optimizer.state
        by_master = {id(twin.master): twin for twin in self}
        for twin in self:
            _move_state(state, twin.master, twin.half)
        for group in self._optimizer.param_groups:
            params: list[Any] = group["params"]
            for index, param in enumerate(params):
                twin = by_master.get(id(param))
                if twin is not None:
                    params[index] = twin.half
        for twin in self:
            twin.master.twin = None
        self._by_half.clear()
        self._known.clear()
        self._weights.clear()


def _move_state(state: dict[Any, Any], source: Any, target: Any) -> None:
    if source in state:
        state[target] = state[source]  # there for a moment twice, so that no interrupt loses it
        del state[source]


def cast_state(state: dict[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Cast floating state of a parameter's shape to its dtype; step counters and others stay."""
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and value.is_floating_point()
            and value.shape == param.shape
            and key != "step"
            and value.dtype != param.dtype
        ):
            state[key] = value.to(param.dtype)
    return state
