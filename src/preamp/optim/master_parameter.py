# SPDX-License-Identifier: BSD-3-Clause
"""The parameter that an optimizer updates in a half weight's place."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch

from preamp.core.tensors import is_sharded, store_grad, stored_grad
from preamp.kernels.shards import instance_of

if TYPE_CHECKING:
    from preamp.optim.table import Twin


class MasterParameter(torch.nn.Parameter):
    """The float32 master of a half parameter, as found in ``optimizer.param_groups``.

    A leaf like any parameter; only ``grad`` is special: it is made from the half gradient when
    it is first read. Copies and pickles are plain parameters without a half weight.
    """

    twin: Twin | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """The unscaled float32 gradient, or ``None``; while ranks share masters, the own part."""
        twin = self.twin
        if twin is None:
            return stored_grad(self)
        table, row, now = twin.table, twin.row, stored_grad(twin.half)
        # Most reads find nothing new, and an optimizer reads this several times for each weight.
        if now is table.seen[row] and not table.has_parts and type(self) is MasterParameter:
            if now is None:
                return stored_grad(self)
            record = table.records[row]
            is_same = now._version == table.versions[row]  # noqa: SLF001
            if is_same and record is not None and record.factor is None:
                return stored_grad(self)
        return twin.own_gradient()

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: torch.Tensor | None
    ) -> None:
        if self.twin is not None:
            self.twin.forget_half_gradient()
            self.twin.table.may_have_bases |= value is not None
        store_grad(self, value)

    @property
    def has_materialized_grad(self) -> bool:
        """Whether a float32 gradient exists already; asking does not make one."""
        held = stored_grad(self) if self.twin is None else self.twin.held.gradient
        return held is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy as a plain parameter: the copy is no half parameter's master."""
        if id(self) not in memo:
            value = self.detach().clone(memory_format=torch.preserve_format)
            memo[id(self)] = torch.nn.Parameter(value, self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter, so that files load without preamp."""
        plain: Any = torch.nn.Parameter(self.detach(), self.requires_grad)
        return plain.__reduce_ex__(protocol)


def is_master(param: torch.Tensor) -> TypeGuard[MasterParameter]:
    """Whether ``param`` is a master; torch makes isinstance of a parameter a slow question."""
    return type(param) in MASTER_KINDS


def leaf_of(param: torch.Tensor) -> torch.Tensor:
    """What gets the gradient of ``param`` in a backward: of a master its half weight."""
    twin = pair_of(param)
    return param if twin is None else twin.half


def leaves_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """`leaf_of` each of several parameters, without a call for each."""
    return [
        param.twin.half if type(param) in MASTER_KINDS and param.twin is not None else param
        for param in cast("Iterable[Any]", params)
    ]


def without_masters(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those of several parameters that are no masters."""
    return [param for param in params if type(param) not in MASTER_KINDS]


def pair_of(param: torch.Tensor) -> Twin | None:
    """The pair of a master and its half weight; ``None`` for any other parameter."""
    return param.twin if is_master(param) else None


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
