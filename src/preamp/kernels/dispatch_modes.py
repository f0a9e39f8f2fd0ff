# SPDX-License-Identifier: BSD-3-Clause
"""Looking at every operation of a thread; torch has no public name for what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch.autograd.graph import increment_version
from torch.utils import _python_dispatch

from preamp.core.tensors import version_of

Listener = Callable[[Any, tuple[Any, ...], Any], None]


class OperationListener(_python_dispatch.TorchDispatchMode):
    """Hands every operation to a listener, and changes none."""

    supports_higher_order_operators = True

    def __init__(self, listener: Listener) -> None:
        """Remember the listener.

        Args:
            listener: Called after each operation with the overload, its positional arguments, and
                its result. Must not raise.
        """
        cast("Any", super()).__init__()
        self._listener = listener

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation as it is."""
        lists = _written_lists(func, args)
        versions = [version_of(tensor) for tensor in lists]
        result = func(*args, **(kwargs or {}))
        # Below a mode torch does not count what operations on lists write in place, and the script
        # would run without the checks that rely on it, torch's and preamp's.
        increment_version(
            [t for t, version in zip(lists, versions, strict=True) if version_of(t) == version]
        )
        self._listener(func, args, result)
        return result

    def start(self) -> None:
        """Look at this thread's operations from now on."""
        self.__enter__()

    def stop(self) -> bool:
        """End that, if no other mode was started since and is still on.

        Returns:
            Whether it has ended; modes can end in the reverse order only.
        """
        if cast("Any", _python_dispatch)._get_current_dispatch_mode() is not self:
            return False
        cast("Any", self).__exit__(None, None, None)
        return True


def _written_lists(func: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """The tensors that an operation on lists is about to write to, where they have versions."""
    name = str(func.overloadpacket)
    if not (name.startswith("aten._foreach_") and name.endswith("_")):
        return []
    return [tensor for tensor in args[0] if not tensor.is_inference()]
