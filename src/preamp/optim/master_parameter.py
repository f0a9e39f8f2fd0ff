# SPDX-License-Identifier: BSD-3-Clause
"""The parameter that an optimizer updates in a half weight's place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeGuard, cast

import torch

from preamp.core.dtypes import is_half
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.tensors import is_sharded, local_of, store_grad, stored_grad
from preamp.core.torch_private.shards import instance_of, set_data, sharded_as, without_local
from preamp.optim.gradients import State

_DATA: Any = cast("Any", torch.Tensor).data


class Pair(Protocol):
    """What a master asks of its row in a `WeightTable`; a `Twin`."""

    half: torch.nn.Parameter
    table: Any
    row: int

    def gradient(self) -> torch.Tensor | None:
        """The unscaled float32 gradient."""
        ...

    def assign_gradient(self, grad: torch.Tensor | None) -> None:
        """The script sets the master's gradient."""

    def value(self) -> torch.Tensor:
        """The exact value, with what was written to either."""
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
        if now is known.seen[row] and type(self) in _LOCAL_KINDS and known.state is not State.HALF:
            version = -1 if now is None else now._version  # noqa: SLF001
            if version == known.versions[row]:
                return stored_grad(self)
        return twin.gradient()

    @grad.setter
    def grad(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, value: torch.Tensor | None
    ) -> None:
        if self.twin is None:
            store_grad(self, value)
        else:
            self.twin.assign_gradient(value)

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


def _of_form() -> set[Callable[..., Any]]:
    """What torch asks a parameter of itself without looking at any value."""
    properties = ("shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "ndim")
    properties += ("grad_fn", "is_cpu", "is_cuda", "is_sparse")
    methods = ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "get_device")
    methods += ("stride", "element_size", "requires_grad_", "__len__")
    kind: Any = torch.Tensor
    found = {getattr(kind, name).__get__ for name in properties}
    found |= {getattr(kind, name) for name in methods}
    found |= {kind.requires_grad.__set__, kind.grad.__set__}
    return found | {torch.is_floating_point, torch.is_complex, torch.numel}


_OF_FORM = _of_form()
_IS_META = cast("Any", torch.Tensor).is_meta.__get__


class SplitMaster(MasterParameter):
    """A master that has no memory: it is its half weight and the 16 bits that a table has beside.

    It has a form and a gradient, and fused optimizers ask no more. Whoever asks torch for its
    values, or to write to it, gets an error. The few functions of torch that ask no class
    (``torch.func``'s transforms, ``torch.tensor(master)``, ``x.data = master``, ``as_subclass``)
    find nan.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func`` if it needs no more than the form of masters."""
        if func is torch.zeros_like:  # by which torch's checkpoints make an optimizer's state
            master, *rest = args
            made = func(form_of(master), *rest, **{"dtype": torch.float32, **(kwargs or {})})
            return made if made.device == master.device else made.to(master.device)
        if func == _IS_META:  # by which torch's checkpoints make new tensors to write to
            return True
        if func not in _OF_FORM:
            raise _has_no_memory()
        parameter: Any = torch.nn.Parameter  # which calls what it is given
        return parameter.__torch_function__(func, types, args, kwargs or {})

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}(shape={tuple(self.shape)})"


def _has_no_memory() -> PreampStateError:
    return bad_state(
        'A master was read or written to that is split (storage="split")',
        "It is kept as its half weight and 16 bits beside each element, which fused optimizers "
        "update as they are; shape, dtype and gradient may be asked for",
        "Clip with preamp.clip_grad_norm_(optimizer, max_norm); read and write weights within "
        'engine.exact_weights(), or pass storage="full"',
    )


def _refuse(master: object) -> None:
    del master
    raise _has_no_memory()


def form_of(param: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and strides of ``param``: of a split master its half weight."""
    if type(param) not in SPLIT_KINDS:
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


def split_master(half: torch.Tensor, device: torch.device) -> MasterParameter:
    """Return the master of ``half`` where masters are split, on ``device``."""
    master = master_parameter(_nothing(half, device), requires_grad=half.requires_grad)
    master.__class__ = _split_kind(type(master))
    return master


def move_split_master(master: MasterParameter, half: torch.Tensor, device: torch.device) -> None:
    """Let it be on ``device``, which tells where its gradient is and its optimizer's state."""
    kind = type(master)
    master.__class__ = SPLIT_KINDS[kind]
    set_data(master, _nothing(half, device))
    master.__class__ = kind


def _nothing(half: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A float32 tensor of the shape of ``half`` that takes no memory."""
    one = torch.full((), math.nan, dtype=torch.float32, device=device)
    return sharded_as(one.expand(local_of(half).shape), half)


@functools.cache
def _split_kind(kind: type[MasterParameter]) -> type[MasterParameter]:
    """The class of masters of ``kind`` where these are split."""
    if kind is MasterParameter:
        return SplitMaster
    names = {"__slots__": (), **without_local(_refuse)}
    made = type("SplitShardedMaster", (SplitMaster, kind), names)
    MASTER_KINDS.add(made)
    SPLIT_KINDS[made] = kind
    return cast("type[MasterParameter]", made)


_LOCAL_KINDS = MasterParameter, SplitMaster
MASTER_KINDS: set[type] = {MasterParameter, SplitMaster}
"""The classes of all masters."""
SPLIT_KINDS: dict[type, type[MasterParameter]] = {SplitMaster: MasterParameter}
"""Those of split masters, and what they would be otherwise."""
