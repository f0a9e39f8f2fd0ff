# SPDX-License-Identifier: BSD-3-Clause
"""Hearing of each function of torch that is called; torch has no public way to end that early."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

_overrides: Any = overrides


def may_be_compiled() -> bool:
    """Whether anything in this process was given to ``torch.compile``.

    It would compile code anew for the mode below, and where torch's functions are wrapped it fails.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends: Mapping[int, object] = getattr(frames, "cached_backends", {})
    return any(map(callable, backends.values()))  # functions kept from it are there as `False`


def is_view_of(tensor: torch.Tensor, others: Sequence[Any]) -> bool:
    """Whether ``tensor`` is a view of the first of ``others``, or both are of a third one."""
    view: Any = tensor
    first: Any = others[0] if others else None
    if not view._is_view() or not isinstance(first, torch.Tensor):
        return False
    return view._base is first or view._base is first._base


def version_of(tensor: torch.Tensor) -> int:
    """How often ``tensor`` was written to; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _asked_for(name: str) -> str:
    """The function that the program has called, where one put over it has called ``name``."""
    frame = inspect.currentframe()
    while frame is not None:
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library == "preamp":
            name = getattr(frame.f_locals.get("fn"), "__name__", name)
        elif library != "torch":
            break
        frame = frame.f_back
    return name.strip("_")


class OperationMode(TorchFunctionMode):
    """Tells of each function that was called on this thread, its arguments and its result."""

    def __init__(self, tell: Callable[[str, Sequence[Any], Any], None]) -> None:
        """Tell nothing before `enter`."""
        super().__init__()
        self._tell = tell

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` and tell of it, but not of attributes that are read."""
        result = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name != "__get__":
            self._tell(_asked_for(name), args, result)
        return result

    def enter(self) -> None:
        """Begin, on this thread."""
        _overrides._push_mode(self)

    def leave(self) -> None:
        """End, also where others have begun since and not ended; those go on."""
        above: list[Any] = []
        if self in _overrides._get_current_function_mode_stack():
            while (top := _overrides._pop_mode()) is not self:
                above.append(top)
            for mode in reversed(above):
                _overrides._push_mode(mode)
