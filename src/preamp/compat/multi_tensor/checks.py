# SPDX-License-Identifier: BSD-3-Clause
"""What every list operation demands of its arguments, checked before anything is changed.

Only the host's knowledge of a tensor is looked at (shape, dtype, device), never its values, so
checking does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from preamp.compat.multi_tensor.applier import TensorLists
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_type, with_article, worded

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)

Tensors = list[torch.Tensor]

_refused = partial(worded, RuntimeError)


@dataclass(frozen=True, slots=True)
class Call:
    """Checked lists of one call."""

    op: str  # name of the operation, for messages
    # Detached tensors that share their memory with the caller's. Those of one element have equal
    # shapes.
    lists: tuple[Tensors, ...]
    device: torch.device  # where all of them lie

    def flag(self, noop_flag: torch.Tensor) -> torch.Tensor:
        """Return the no-op flag as a scalar that shares its memory."""
        return self.scalar("noop_flag", noop_flag, torch.int32)

    def found_inf(self, noop_flag: torch.Tensor) -> torch.Tensor:
        """Return the flag as the update rules take it: nothing changes where it is not 0."""
        return (self.flag(noop_flag) != 0).float()

    def factor(self, number: float) -> torch.Tensor | None:
        """Return a factor of the gradients as the update rules take it."""
        dtypes = {tensors[0].dtype for tensors in self.lists}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        return None if number == 1 else torch.full((), number, dtype=dtype, device=self.device)

    def scalar(
        self, name: str, value: torch.Tensor, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a one-element tensor as a scalar that shares its memory."""
        allowed = f"{name} is a contiguous {dtype_name(dtype)} tensor with numel 1 on {self.device}"
        do = f"Make it with torch.zeros(1, dtype={dtype}, device={str(self.device)!r})"
        if not isinstance(cast("object", value), torch.Tensor):
            got = f"{self.op}: {name} is {with_article(type(value).__name__)}"
            raise bad_type(got, allowed, do)
        fits = value.dtype is dtype and value.numel() == 1 and value.is_contiguous()
        if not fits or value.device != self.device:
            got = f"{dtype_name(value.dtype)} of shape {tuple(value.shape)} on {value.device}"
            raise self.refuse(f"{name} is {got}", allowed, do)
        return value.detach().view(())

    def number(self, name: str, value: torch.Tensor | float) -> torch.Tensor | float:
        """Return a factor that may be a number or a one-element tensor, without reading it."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.numel() != 1:
            raise self.refuse(
                f"{name} has {value.numel()} elements",
                f"{name} is a number or a tensor of one element",
                "Call the op once for each factor",
            )
        return value.detach().reshape(())

    def refuse(self, got: str, allowed: str, do: str) -> RuntimeError:
        """Return the error for an argument of this call."""
        return _refused(f"{self.op}: {got}", allowed, do)


def checked(
    op: str, tensor_lists: TensorLists, names: Sequence[str], optional: Sequence[str] = ()
) -> Call:
    """Check the lists of a call and return what the arithmetic works on.

    Tensors are paired by index where their shapes agree, whatever their strides. Where only
    their sizes agree, both are taken as flat memory. ``names`` say what each list holds, those in
    ``optional`` may follow. A list that does not fit raises ``RuntimeError``; one that holds
    something other than tensors, ``TypeError``.
    """
    lists = [list(tensors) for tensors in tensor_lists]
    _check_counts(op, lists, names, optional)
    for name, tensors in zip((*names, *optional), lists, strict=False):
        for index, tensor in enumerate(tensors):
            _check_tensor(op, f"{name}[{index}]", tensor, tensors[0])
            if tensor.numel() != lists[0][index].numel():
                raise _refused(
                    f"{op} got a size mismatch: {name}[{index}] has {tensor.numel()} elements, "
                    f"{names[0]}[{index}] has {lists[0][index].numel()}",
                    "Tensors at the same place of each list have equally many elements",
                    "Check the order of the lists",
                )
            if tensor.device != lists[0][0].device:
                raise _refused(
                    f"{op}: A tensor was not on the same device as the first tensor: "
                    f"{name}[{index}] is on {tensor.device}, {names[0]}[0] on {lists[0][0].device}",
                    "All tensors of a call lie on one device",
                    "Call the op once for each device",
                )
    rows = [_aligned(row) for row in zip(*lists, strict=True)]
    return Call(op, tuple(list(column) for column in zip(*rows, strict=True)), lists[0][0].device)


def raise_flag_(flag: torch.Tensor, found: torch.Tensor) -> None:
    """Set the int32 scalar ``flag`` to 1 if the scalar ``found`` is true; never to 0."""
    flag.masked_fill_(found, 1)


def check_mode(call: Call, mode: int) -> None:
    """Refuse a mode of weight decay other than 0 and 1."""
    if mode not in (0, 1):
        raise call.refuse(
            f"mode is {mode!r}",
            "0 is L2 regularisation, 1 is decoupled decay",
            "Pass 1 for the method called AdamW",
        )


def _check_counts(
    op: str, lists: list[Tensors], names: Sequence[str], optional: Sequence[str]
) -> None:
    if not len(names) <= len(lists) <= len(names) + len(optional):
        more = "".join(f", and optionally {name}" for name in optional)
        raise _refused(
            f"{op} got {len(lists)} tensor lists",
            f"It takes {len(names)}: {', '.join(names)}{more}",
            "Pass them in this order as one list of lists",
        )
    lengths = [len(tensors) for tensors in lists]
    if len(set(lengths)) > 1 or not lengths[0]:
        raise _refused(
            f"{op} got tensor lists of {', '.join(map(str, lengths))} tensors",
            "The lists of a call are equally long, and not empty",
            "Pass one tensor in every list for each element, or leave the call out",
        )


def _check_tensor(op: str, where: str, tensor: object, first: torch.Tensor) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise bad_type(
            f"{op}: {where} is {with_article(type(tensor).__name__)}",
            "Lists hold tensors only",
            "Leave parameters without a gradient out of every list",
        )
    if tensor.dtype not in FLOATING:
        raise _refused(
            f"{op}: {where} is {dtype_name(tensor.dtype)}",
            f"Tensors are {', '.join(map(dtype_name, FLOATING))}",
            "Leave other tensors out of every list",
        )
    if tensor.dtype is not first.dtype:
        raise _refused(
            f"{op}: {where} is {dtype_name(tensor.dtype)}, the first of its list "
            f"{dtype_name(first.dtype)}",
            "The tensors of one list share a dtype",
            "Call the op once for each dtype",
        )
    is_strided = tensor.layout is torch.strided
    if not (is_strided and any(tensor.is_contiguous(memory_format=form) for form in FORMATS)):
        how = f"strides {tensor.stride()}" if is_strided else f"layout {tensor.layout}"
        raise _refused(
            f"{op}: {where} is not contiguous: it has shape {tuple(tensor.shape)} and {how}",
            "Tensors are dense and contiguous, channels_last or channels_last_3d",
            "Pass its contiguous() and copy back what the op changes",
        )


def _aligned(row: Sequence[torch.Tensor]) -> Tensors:
    """Tensors of one element without their history, flat unless all have the same shape."""
    detached = [tensor.detach() for tensor in row]
    if len({tensor.shape for tensor in detached}) == 1:
        return detached
    return [tensor.as_strided((tensor.numel(),), (1,)) for tensor in detached]
