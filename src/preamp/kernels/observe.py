# SPDX-License-Identifier: BSD-3-Clause
"""Tensors without memory, and every operation that runs: what torch has no public name for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

Observer = Callable[[str, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Gets an operation's name such as ``"aten.mm"``, the tensors that went in, and those that came
out."""


class ObservedOps(TorchDispatchMode):
    """While entered, tells of every operation of this thread's forwards and backwards.

    Args:
        observer: Called after each operation, with observation off.
    """

    def __init__(self, observer: Observer) -> None:
        """Begin with ``with``."""
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        self._observer(name, list(_tensors((args, kwargs))), list(_tensors(result)))
        return result


def fake_tensors() -> AbstractContextManager[Any]:
    """While entered, new tensors have shape, dtype and device but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in cast("Mapping[Any, Any]", value).values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in cast("Sequence[Any]", value):
            yield from _tensors(item)
