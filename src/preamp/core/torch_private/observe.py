# SPDX-License-Identifier: BSD-3-Clause
"""Tensors without memory, and every operation that runs: what torch has no public name for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import increment_version
from torch.utils import _python_dispatch

from preamp.core.pytree import tensors_in
from preamp.core.tensors import version_of

Observer = Callable[[Any, Sequence[torch.Tensor], Sequence[torch.Tensor]], None]
"""Gets an operation's overload, whose ``overloadpacket`` is such as ``aten.mm``, the tensors that
went in, in the order of the arguments, and those that came out. Must not raise."""


class ObservedOps(_python_dispatch.TorchDispatchMode):
    """While entered, tells of every operation of this thread's forwards and backwards.

    Args:
        observer: Called after each operation, with observation off.
    """

    supports_higher_order_operators = True

    def __init__(self, observer: Observer) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self._observer = observer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        lists = _written_lists(func, args)
        versions = [version_of(tensor) for tensor in lists]
        result = func(*args, **(kwargs or {}))
        # Below a mode torch does not count what operations on lists write in place, and the script
        # would run without the checks that rely on it, torch's and preamp's.
        increment_version(
            [t for t, version in zip(lists, versions, strict=True) if version_of(t) == version]
        )
        self._observer(func, list(tensors_in((args, kwargs))), list(tensors_in(result)))
        return result

    def start(self) -> bool:
        """Look at this thread's operations from now on, unless another mode does.

        That one, which may end first, would end this one in its place.
        """
        if cast("Any", _python_dispatch)._get_current_dispatch_mode() is not None:
            return False
        self.__enter__()
        return True

    def stop(self) -> bool:
        """End that, and tell whether it has ended: modes can end in the reverse order only."""
        if cast("Any", _python_dispatch)._get_current_dispatch_mode() is not self:
            return False
        cast("Any", self).__exit__(None, None, None)
        return True


def fake_tensors() -> AbstractContextManager[Any]:
    """While entered, new tensors have shape, dtype and device but no memory."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fakes_tensors() -> bool:
    """Whether this thread's operations run on such tensors, whoever has asked for them."""
    modes = cast("Any", _python_dispatch)._get_current_dispatch_mode_stack()
    return any(isinstance(mode, FakeTensorMode) for mode in modes)


def _written_lists(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operation on lists is about to write to, where they have versions."""
    name = str(func.overloadpacket)
    if not (name.startswith("aten._foreach_") and name.endswith("_")):
        return []
    return [tensor for tensor in args[0] if not tensor.is_inference()]
