# SPDX-License-Identifier: BSD-3-Clause
"""The parameter that an optimizer updates in a half weight's place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeGuard, cast

import torch

from preamp.core.dtypes import is_half
from preamp.core.pytree import tensors_in
from preamp.core.tensors import is_sharded, store_grad, stored_grad
from preamp.core.torch_private.shards import before_local, instance_of, set_data

_DATA: Any = cast("Any", torch.Tensor).data


class Pair(Protocol):
    """What a master asks of its row in a `WeightTable`; a `Twin`."""

    half: torch.nn.Parameter
    table: Any
    row: int

    def gradient(self) -> torch.Tensor | None:
        """The unscaled float32 gradient."""
        ...

    def forget_half_gradient(self) -> None:
        """The master's gradient was assigned."""

    def settle(self) -> None:
        """Take over what was written to the half weight."""

    def value(self) -> torch.Tensor:
        """All of the master."""
        ...

    @property
    def kept(self) -> torch.Tensor:
        """What the master takes memory for."""
        ...


class MasterParameter(torch.nn.Parameter):
    """The float32 master of a half parameter, as found in ``optimizer.param_groups``.

    A leaf like any parameter; only ``grad`` is special: it is made from the half gradient when
    it is first read. Whoever takes its ``data`` is noticed. Copies and pickles are plain
    parameters without a half weight: those of the half weight itself where it is copied or pickled
    in the same call.
    """

    twin: Pair | None = None

    @property
    def grad(self) -> torch.Tensor | None:
        """The unscaled float32 gradient, or ``None``."""
        twin = self.twin
        if twin is None:
            return stored_grad(self)
        table, row, now = twin.table, twin.row, stored_grad(twin.half)
        known = table.gradients
        # Most reads find nothing new, and an optimizer reads this several times for each weight.
        if now is known.seen[row] and type(self) in _LOCAL_KINDS:
            if now is None:
                return stored_grad(self) if known.may_have_bases else None
            record = known.records[row]
            is_same = now._version == known.versions[row]  # noqa: SLF001
            if is_same and record is not None and record.factor is None:
                return stored_grad(self)
        return twin.gradient()

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: torch.Tensor | None
    ) -> None:
        if self.twin is not None:
            self.twin.forget_half_gradient()
            self.twin.table.gradients.may_have_bases |= value is not None
        store_grad(self, value)

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
        _DATA.__set__(self, value)

    @property
    def has_materialized_grad(self) -> bool:
        """Whether a float32 gradient exists already; asking does not make one."""
        twin = self.twin
        held = stored_grad(self) if twin is None else twin.table.gradients.base(twin.row)
        return held is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        """Copy as a plain parameter, which in this copy is the half weight's copy as well."""
        if id(self) in memo:
            return memo[id(self)]
        half = None if self.twin is None else self.twin.half
        made = None if half is None else memo.get(id(half))
        if made is None or is_half(made):
            value = self._settled().clone(memory_format=torch.preserve_format)
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
        plain: Any = torch.nn.Parameter(self._settled(), requires_grad)
        if half is not None:
            plain.__dict__.update(vars(half))
        return plain.__reduce_ex__(protocol)

    def _settled(self) -> torch.Tensor:
        """The value, with what was written to the half weight, and on its device."""
        twin = self.twin
        if twin is None:
            return self.detach()
        if twin.half.dtype is not torch.float32:  # not inside `exact_weights`
            twin.settle()
        return twin.value().detach().to(twin.half.device)


def _of_form() -> set[Callable[..., Any]]:
    """What torch asks a parameter of itself without looking at any value."""
    properties = ("shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "ndim")
    properties += ("grad_fn", "is_cpu", "is_cuda", "is_sparse", "is_meta")
    methods = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "get_device")
    methods += ("element_size", "requires_grad_", "__len__")
    kind: Any = torch.Tensor
    found = {getattr(kind, name).__get__ for name in properties}
    found |= {getattr(kind, name) for name in methods}
    found |= {kind.requires_grad.__set__, kind.grad.__set__}
    return found | {torch.is_floating_point, torch.is_complex, torch.numel}


_OF_FORM = _of_form()


class PackedMaster(MasterParameter):
    """A master that has no memory: it is its half weight and the 16 bits that a table has beside.

    Whatever torch is asked of it but its form makes the masters of the whole table first, so that
    whoever reads or writes one finds float32. `WeightTable` changes the class there and back. The
    few functions of torch that ask no class (``torch.func``'s transforms, ``torch.tensor(master)``,
    ``x.data = master``, ``as_subclass``) find nan: they need ``master.detach()``.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, of masters that are there where it needs more than their form."""
        if func not in _OF_FORM:
            make_masters(tensors_in((args, kwargs)))
        parameter: Any = torch.nn.Parameter  # which calls what it is given
        return parameter.__torch_function__(func, types, args, kwargs or {})


def make_masters(params: Iterable[torch.Tensor]) -> None:
    """Make the masters among ``params`` float32 tensors where they are packed."""
    for param in cast("Iterable[Any]", params):
        if type(param) in PACKED_KINDS:
            param.twin.table.make()


def kept_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What parameters take memory for, without making masters that are packed."""
    return [
        param.twin.kept if is_master(param) and param.twin is not None else param
        for param in params
    ]


def form_of(param: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and strides of ``param``: of a packed master its half weight."""
    if type(param) not in PACKED_KINDS:
        return param
    twin: Pair = cast("Any", param).twin
    return twin.half.detach()


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


@functools.cache
def packed_kind(kind: type[MasterParameter]) -> type[MasterParameter]:
    """The class of masters of ``kind`` while they are packed."""
    if kind is MasterParameter:
        return PackedMaster
    names = {"__slots__": (), **before_local(lambda param: make_masters((param,)))}
    made = type("PackedShardedMaster", (PackedMaster, kind), names)
    MASTER_KINDS.add(made)
    PACKED_KINDS[made] = kind
    return cast("type[MasterParameter]", made)


_LOCAL_KINDS = MasterParameter, PackedMaster
MASTER_KINDS: set[type] = {MasterParameter, PackedMaster}
"""The classes of all masters."""
PACKED_KINDS: dict[type, type[MasterParameter]] = {PackedMaster: MasterParameter}
"""Those of packed masters, and what they are otherwise."""
