# SPDX-License-Identifier: BSD-3-Clause
"""The back ends that run on every machine, as one parameter of a test."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from preamp.kernels.jit import Jit
from preamp.kernels.plain import Plain

REFERENCE: Any = Plain(fuses=False)
PLAIN = Plain()
JIT = Jit()

CUT = Plain(fuses=False, near=64)
"""In runs so short that the tensors of the tests fill several."""


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Tensors of a block have this dtype and device unless told otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


AS_THEY_ARE = {"reference": REFERENCE, "plain": PLAIN, "jit": JIT}
EVERY = {**AS_THEY_ARE, "cut": CUT}

# By their names, which the fixture ``ops`` of tests/kernels makes back ends of.
here = pytest.mark.parametrize("ops", EVERY, indirect=True)
"""Every back end but Triton's, whose interpreter takes seconds for large or many tensors."""

as_they_are = pytest.mark.parametrize("ops", AS_THEY_ARE, indirect=True)
"""With runs of the size that they really have."""


class Elsewhere:
    """A back end of another device, which takes tensors of the CPU there and what it wrote back.

    Tensors of one call may not overlap: there each would have memory of its own.
    """

    def __init__(self, ops: Any, device: torch.device) -> None:
        self._ops = ops
        self._device = device

    def __getattr__(self, name: str) -> Any:
        if not callable(getattr(self._ops, name)):
            return getattr(self._ops, name)

        def call(*given: Any, **named: Any) -> Any:
            taken: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
            given, named = self._take(given, taken), self._take(named, taken)
            _refuse_overlaps([tensor for tensor, _, _ in taken.values()])
            try:
                result = getattr(self._ops, name)(*given, **named)
            finally:
                for tensor, there, version in taken.values():
                    if there._version != version:
                        with torch.no_grad():
                            tensor.copy_(there)
            known = {id(there): tensor for tensor, there, _ in taken.values()}
            return _each(result, lambda there: known.get(id(there), there.cpu()))

        return call

    def _take(self, thing: Any, taken: dict[int, Any]) -> Any:
        def there(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in taken:
                own = tensor.detach()
                if tensor.layout is torch.strided:
                    own = torch.empty_strided(
                        own.shape, own.stride(), dtype=own.dtype, device=self._device
                    ).copy_(own)
                else:
                    own = own.to(self._device, copy=True)
                own.requires_grad_(tensor.requires_grad)
                # Writes to the values of a sparse tensor are not counted.
                version = own._version if tensor.layout is torch.strided else -1
                taken[id(tensor)] = tensor, own, version
            return taken[id(tensor)][1]

        return _each(thing, there, self._device)


def _refuse_overlaps(tensors: Iterable[torch.Tensor]) -> None:
    spans = sorted(
        (one.data_ptr(), one.data_ptr() + _bytes_spanned(one))
        for one in tensors
        if one.layout is torch.strided and one.device.type == "cpu" and one.numel() > 0
    )
    if any(start < end for (_, end), (start, _) in pairwise(spans)):
        raise ValueError("Two tensors of one call overlap. Pass a copy of one of them.")


def _bytes_spanned(tensor: torch.Tensor) -> int:
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in sizes)) * tensor.element_size()


def _each(thing: Any, change: Any, device: torch.device | None = None) -> Any:
    """The same with every tensor changed, and every device if one is given."""
    if isinstance(thing, torch.Tensor):
        return change(thing)
    if isinstance(thing, torch.device):
        return thing if device is None else device
    if isinstance(thing, dict):
        return {key: _each(value, change, device) for key, value in thing.items()}
    if isinstance(thing, list | tuple):
        return type(thing)([_each(value, change, device) for value in thing])
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        names = [field.name for field in dataclasses.fields(thing)]
        changed = {name: _each(getattr(thing, name), change, device) for name in names}
        return dataclasses.replace(thing, **changed)
    return thing
