# SPDX-License-Identifier: BSD-3-Clause
"""The masters of one optimizer, and their exchange with its ``param_groups``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import is_
from typing import Any

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import PreampStateError, bad_state, with_article
from preamp.optim.master_parameter import MasterParameter, is_master
from preamp.optim.table import Twin, WeightTable

Group = dict[str, Any]
NameOf = Callable[[torch.Tensor], str]


class Masters:
    """The masters of an optimizer's half weights, which no other optimizer of the engine has.

    The optimizer's group dicts, their ``params`` lists and its ``state`` keep their identity:
    schedulers and optimizers hold references to them. Only list entries are exchanged.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        table: WeightTable,
        name_of: NameOf,
        every: list[Masters],
    ) -> None:
        """Start without masters; `adopt` makes them. ``every`` are those of the engine."""
        self.optimizer = optimizer
        self._table = table
        self._name_of = name_of
        self._every = every
        self._by_half: dict[int, Twin] = {}
        self._known: list[list[Any]] = []  # the parameters of each group, as last adopted

    @property
    def tables(self) -> list[WeightTable]:
        """The one that the rows are in, if there are any."""
        return [self._table] if len(self._table) else []

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
        groups = self.optimizer.param_groups
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
        twin = self._by_half.get(id(half)) or self._add_row(half, original)
        state: dict[Any, Any] = self.optimizer.state
        _move_state(state, half, twin.master)
        if twin.master in state:
            cast_state(state[twin.master], twin.master)
        return twin.master

    def _add_row(self, half: Any, original: torch.Tensor | None) -> Twin:
        for other in self._every:
            if other.of_half(half) is not None:
                raise in_two_optimizers(self._name_of(half), other.optimizer, self.optimizer)
        table = self._table
        data = half.detach() if original is None else original
        value = data.to(table.home_of(half), torch.float32)
        twin = self._by_half[id(half)] = table.add(half, value, self._name_of(half))
        return twin

    def release(self) -> None:
        """Put the model parameters back into the groups, and the state under them.

        May be called again if it was interrupted.
        """
        state: dict[Any, Any] = self.optimizer.state
        by_master = {id(twin.master): twin for twin in self}
        for twin in self:
            _move_state(state, twin.master, twin.half)
        for group in self.optimizer.param_groups:
            params: list[Any] = group["params"]
            for index, param in enumerate(params):
                twin = by_master.get(id(param))
                if twin is not None:
                    params[index] = twin.half
        for twin in self:
            twin.master.twin = None
        self._by_half.clear()
        self._known.clear()
        self._table.clear()
        self._every.clear()


def in_two_optimizers(name: str, first: object, second: object) -> PreampStateError:
    """Return the error for a half weight that a second optimizer is to update as well."""
    kinds = [with_article(type(optimizer).__name__) for optimizer in (first, second)]
    return bad_state(
        f"The half weight {name!r} is in two optimizers, {kinds[0]} and {kinds[1]}",
        "Where weights are half, each is updated by one optimizer",
        "Give it to one of the two, or choose O1 (O4 for bfloat16), where weights stay float32 and "
        "may be in both",
    )


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
