# SPDX-License-Identifier: BSD-3-Clause
"""The parameter that an optimizer updates in a half weight's place."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

import torch

from preamp.core.dtypes import is_half
from preamp.core.tensors import is_sharded, store_grad, stored_grad
from preamp.core.torch_private.shards import instance_of, set_data
from preamp.optim.gradients import State

_DATA: Any = cast("Any", torch.Tensor).data


class MasterParameter(torch.nn.Parameter):
    """The float32 master of a half parameter, as found in ``optimizer.param_groups``.

    A leaf like any parameter; only ``grad`` is special: it is made from the half gradient when
    it is first read. Whoever takes its ``data`` is noticed. Copies and pickles are plain
    parameters without a half weight: those of the half weight itself where it is copied or pickled
    in the same call.
    """

    twin: Any = None
    """Its row, a `Twin`; ``None`` where there is none any more."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The unscaled float32 gradient, or ``None``."""
        twin = self.twin
        if twin is None:
            return stored_grad(self)
        table, row, now = twin.table, twin.row, stored_grad(twin.half)
        known = table.gradients
        # Most reads find nothing new, and an optimizer reads this several times for each weight.
        if now is known.seen[row] and type(self) in LOCAL_KINDS and known.state is not State.HALF:
            version = -1 if now is None else now._version  # noqa: SLF001
            if version == known.versions[row]:
                return stored_grad(self)
        return known.gradient(row)

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: torch.Tensor | None
    ) -> None:
        if self.twin is None:
            store_grad(self, value)
        else:
            self.twin.table.gradients.assign(self.twin.row, value)

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor. Torch counts no write to it, so the table compares values later."""
        found: torch.Tensor = _DATA.__get__(self)
        if self.twin is not None:
            self.twin.table.hand_out(self.twin.row)
        return found

    @data.setter
    def data(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: torch.Tensor
    ) -> None:
        if self.twin is not None:  # first, so that no interrupt loses it
            self.twin.table.note_master_changed(self.twin.row)
        _DATA.__set__(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy as a plain parameter, which in this copy is the half weight's copy as well."""
        if id(self) in memo:
            return memo[id(self)]
        half = None if self.twin is None else self.twin.half
        made = None if half is None else memo.get(id(half))
        if made is None or is_half(made):
            value = self._value().clone(memory_format=torch.preserve_format)
            if made is None:
                made = torch.nn.Parameter(value, (self if half is None else half).requires_grad)
            else:  # in a list of parameters that was copied before
                set_data(made, value)
        memo[id(self)] = made
        if half is not None:
            memo[id(half)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter, which a file can hold without naming preamp."""
        half = None if self.twin is None else self.twin.half
        requires_grad = (self if half is None else half).requires_grad
        plain: Any = torch.nn.Parameter(self._value(), requires_grad)
        if half is not None:
            plain.__dict__.update(vars(half))
        return plain.__reduce_ex__(protocol)

    def _value(self) -> torch.Tensor:
        """The exact value, on the half weight's device."""
        twin = self.twin
        return self.detach() if twin is None else twin.value().to(twin.half.device)


def is_master(param: torch.Tensor) -> TypeGuard[MasterParameter]:
    """Whether ``param`` is a master; torch makes isinstance of a parameter a slow question."""
    return type(param) in MASTER_KINDS


def leaf_of(param: torch.Tensor) -> torch.Tensor:
    """What gets the gradient of ``param`` in a backward: of a master its half weight."""
    return leaves_of((param,))[0]


def leaves_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`leaf_of` each of several parameters, without a call for each."""
    return [
        param.twin.half if type(param) in MASTER_KINDS and param.twin is not None else param
        for param in cast("Iterable[Any]", params)
    ]


def without_masters(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of several parameters that are no masters."""
    return [param for param in params if type(param) not in MASTER_KINDS]


def master_parameter(data: torch.Tensor, *, requires_grad: bool) -> MasterParameter:
    """Return ``data``, float32, as a master; not copied. Of a sharded tensor a sharded one."""
    if not is_sharded(data):
        return MasterParameter(data, requires_grad=requires_grad)
    return instance_of(sharded_kind(type(data)), data, requires_grad=requires_grad)


@functools.cache
def sharded_kind(kind: type[torch.Tensor]) -> type[MasterParameter]:
    """The class of masters whose data is of ``kind``, a ``DTensor``."""
    made = type("ShardedMasterParameter", (MasterParameter, kind), {"__slots__": ()})
    MASTER_KINDS.add(made)
    return cast("type[MasterParameter]", made)


MASTER_KINDS: set[type] = {MasterParameter}
"""The classes of all masters."""
LOCAL_KINDS: set[type] = {MasterParameter}
"""Those of masters that are not sharded."""
