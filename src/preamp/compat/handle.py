# SPDX-License-Identifier: BSD-3-Clause
"""``amp.init``: function casts without models or optimizers at hand, Apex's interface of 2018.

Its casts are the op table's, on the thread that calls ``init``. A weight is cast at each use: a
cache that outlives the forward hands out stale values once the weight changes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch

from preamp.casting import (
    device_types_here,
    disable_casts,
    install_function_casts,
    install_wide_where_slow,
    push_thread_casts,
    settle_thread,
)
from preamp.casting.autocast_state import is_casting
from preamp.compat.amp_state import amp_state
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import unavailable, worded
from preamp.core.undo import UndoStack

_LINES = """
- handle = amp.init(enabled=...)
- optimizer = handle.wrap_optimizer(optimizer)
+ model, optimizer = amp.initialize(model, optimizer, opt_level="O1", enabled=...)
- with optimizer.scale_loss(loss) as scaled_loss:
+ with amp.scale_loss(loss, optimizer) as scaled_loss:
"""


def _gone(name: str) -> Exception:
    return unavailable(
        f"{name} of a handle was called, as scripts of 2018 do",
        "Handles cast functions; losses are scaled for optimizers that amp.initialize has",
        f"Edit these lines:{_LINES}  with num_losses and loss_id where there are several losses",
    )


class AmpHandle:
    """Function casts that are on, of ``amp.init`` or of an engine that ``amp.initialize`` made."""

    def __init__(self, stop: Callable[[], None]) -> None:
        """Casts are on until ``stop`` is called, which may be called again."""
        self._stop = stop
        self._is_on = True

    def is_active(self) -> bool:
        """Whether the handle is on and functions are cast here."""
        return self._is_on and any(is_casting(kind) for kind in device_types_here())

    def deactivate(self) -> None:
        """Take all casts back, the latest first."""
        settle_thread()
        self._is_on = False
        self._stop()

    _deactivate = deactivate  # Apex's name

    def _disable_casts(self) -> AbstractContextManager[None]:
        """Return a block without casts; nests, and ends properly on exceptions."""
        return disable_casts()

    def _clear_cache(self) -> None:
        """Do nothing: scripts call it after they change weights, which no cast outlives here."""

    def scale_loss(self, loss: Any, optimizer: Any) -> NoReturn:
        """Raise `PreampUnavailableError`, which says what to write instead."""
        raise _gone("scale_loss")

    def wrap_optimizer(self, optimizer: Any, num_loss: int = 1) -> NoReturn:
        """Raise `PreampUnavailableError`, which says what to write instead."""
        raise _gone("wrap_optimizer")


class NoOpHandle(AmpHandle):
    """The handle of ``init(enabled=False)``: nothing is on."""

    def __init__(self) -> None:
        super().__init__(stop=lambda: None)
        self._is_on = False


class _Current:
    """The latest handle: what ``init`` is called for again, it replaces."""

    handle: AmpHandle = NoOpHandle()


def init(
    enabled: bool = True, *, allow_banned: bool = False, patch_type: torch.dtype = torch.float16
) -> AmpHandle:
    """Turn function casts on for this thread, as ``opt_level="O1"`` does, with nothing else.

    An earlier handle is deactivated first.

    Args:
        enabled: False turns nothing on and returns a `NoOpHandle`.
        allow_banned: Cast the arguments of banned functions (``binary_cross_entropy``) to float32
            instead of refusing half ones.
        patch_type: ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        The handle; ``deactivate()``, which Apex called ``_deactivate``, ends the casts.

    Raises:
        RuntimeError: ``patch_type`` is another dtype.

    Mutates:
        Functions of torch and the thread's autocast state, until ``handle.deactivate()``;
        ``_amp_state.handle``.
    """
    if patch_type not in HALF_DTYPES:
        raise worded(
            RuntimeError,
            f"patch_type={patch_type!r} is not possible",
            "Casts go to torch.float16 or torch.bfloat16",
            "Leave it out for torch.float16",
        )
    _Current.handle.deactivate()
    if not enabled:
        return NoOpHandle()
    undo = UndoStack()
    install_function_casts(undo, allow_banned=allow_banned)
    install_wide_where_slow(patch_type, undo)
    push_thread_casts(device_types_here(), patch_type, undo)
    _Current.handle = amp_state.handle = AmpHandle(undo.unwind)
    return _Current.handle
