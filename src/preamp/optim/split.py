# SPDX-License-Identifier: BSD-3-Clause
"""Masters that are their half weights and the 16 bits that these lack, beside each element.

What stands in the optimizer's groups is a parameter with a form and a gradient. Values are joined
for whoever asks the table for them; updates of fused optimizers take both parts as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from preamp.core.errors import bad_state
from preamp.core.tensors import local_of
from preamp.core.torch_private.shards import set_data, sharded_as, without_local
from preamp.kernels.stored import are_beyond_float16
from preamp.optim.master_parameter import (
    LOCAL_KINDS,
    MASTER_KINDS,
    MasterParameter,
    master_parameter,
)
from preamp.optim.table import Twin, WeightTable

if TYPE_CHECKING:
    from torch.nn import Parameter


class SplitTable(WeightTable):
    """Rows whose masters are their half weights and 16 bits beside each element of these.

    So an element is its half weight, and no further than half a unit in the last place away from
    it. Only updates that take half weights and the rest as they are work on such rows.
    """

    is_split = True

    def __init__(self, *given: Any, **named: Any) -> None:
        """Start without rows; arguments as those of `WeightTable`."""
        super().__init__(*given, **named)
        self._marked = []  # nobody writes to masters that have no memory

    def add(self, half: Parameter, value: torch.Tensor, name: str) -> Twin:
        """Add a row with the float32 ``value``, of which nothing is kept."""
        home = self.home_of(half)
        low = torch.empty_like(local_of(half.detach()), dtype=torch.int16, device=home)
        twin = self._add(half, split_master(half, home), low, name)
        self.set_value(twin.row, value)
        return twin

    def come_along(self, row: int) -> None:
        """Let what is beside the half weight lie where that has moved, or on the host."""
        if self.halves[row].dtype is not self.twins[row].dtype:
            raise self.became_wide(row)
        self._move(row)

    def _move(self, row: int) -> None:
        half, low = self.halves[row], cast("torch.Tensor", self.lows[row])
        if low.device != self.home_of(half):
            self.lows[row] = low.to(self.home_of(half))
            move_split_master(self.masters[row], half, self.home_of(half))

    def parts(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the half weight and what is beside it."""
        self._move(row)
        # After model.float() the values are those of half weights still.
        half = local_of(self.halves[row].detach()).to(self.twins[row].dtype)
        return half, cast("torch.Tensor", self.lows[row])

    def value(self, row: int) -> torch.Tensor:
        """The exact float32 value of a row, in memory of its own."""
        if self.is_exact:
            return self.halves[row].detach()
        half, low = self.parts(row)
        wide = torch.empty_like(half, dtype=torch.float32, device=low.device)
        self.ops.join_([half], [low], [wide])
        return sharded_as(wide, self.halves[row])

    @torch.no_grad()
    def set_value(self, row: int, value: torch.Tensor) -> None:
        """Let a row have another exact value, rounded with ties away from zero.

        Raises `PreampStateError` for one that float16 weights and 16 bits cannot hold;
        synchronises for that at float16.
        """
        self.come_along(row)
        half, low = local_of(self.halves[row].detach()).data, cast("Any", self.lows[row])
        wide = local_of(value.detach()).to(low.device, torch.float32)
        if half.dtype is torch.float16 and True in are_beyond_float16([wide]):
            name = self.twins[row].name
            raise bad_state(
                f"The float16 weight {name!r} was given values beyond 65504, where it is infinite",
                "Masters that large cannot be told from infinite ones where they are split "
                '("split")',
                f"Use opt_level='O5' (bfloat16), storage='full', or keep_fp32=[{name!r}]",
            )
        self.ops.split_([wide], [half], [low])

    def absorb(self) -> None:
        """A split master is what its half weight is."""
        self.follow()


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
            _refuse(args)
        parameter: Any = torch.nn.Parameter  # which calls what it is given
        return parameter.__torch_function__(func, types, args, kwargs or {})

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return f"{type(self).__name__}(shape={tuple(self.shape)})"


def _refuse(_: object) -> NoReturn:
    raise bad_state(
        'A master was read or written to that is split (storage="split")',
        "It is kept as its half weight and 16 bits beside each element, which fused optimizers "
        "update as they are; shape, dtype and gradient may be asked for",
        "Clip with preamp.clip_grad_norm_(optimizer, max_norm); read and write weights within "
        'engine.exact_weights(), or pass storage="full"',
    )


def form_of(param: torch.Tensor) -> torch.Tensor:
    """A tensor of the shape and strides of ``param``: of a split master its half weight."""
    if type(param) not in SPLIT_KINDS:
        return param
    twin: Twin = cast("Any", param).twin
    return twin.half.detach()


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


SPLIT_KINDS: dict[type, type[MasterParameter]] = {SplitMaster: MasterParameter}
"""The classes of split masters, and what they would be otherwise."""
MASTER_KINDS.add(SplitMaster)
LOCAL_KINDS.add(SplitMaster)
