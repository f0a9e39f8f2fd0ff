# SPDX-License-Identifier: BSD-3-Clause
"""Looking at every operation of a thread; torch has no public name for what that takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch.utils import _python_dispatch

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
        result = func(*args, **(kwargs or {}))
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
