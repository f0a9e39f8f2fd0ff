# SPDX-License-Identifier: BSD-3-Clause
"""Hearing of each function of torch that is called; torch has no public way to end that early."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol, cast

import torch
from torch import overrides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

_overrides: Any = overrides
_READ = "__get__"  # the name of an attribute's function when it is read, whichever it is


def may_be_compiled() -> bool:
    """Whether anything in this process was given to ``torch.compile``.

    It would compile code anew for the mode below, and where torch's functions are wrapped it fails.
    """
    frames = sys.modules.get("torch._dynamo.eval_frame")
    backends: Mapping[int, object] = getattr(frames, "cached_backends", {})
    return any(map(callable, backends.values()))  # functions kept from it are there as `False`


def may_not_be_read() -> bool:
    """Whether a graph is being made: reading its tensors would become a part of it."""
    return torch.compiler.is_compiling() or cast("Any", torch.jit).is_tracing()


class Memory(Protocol):
    """What tensors have in common that share memory; it does not keep that memory."""

    cdata: int  # no other memory has the same one while this lives

    def expired(self) -> bool:
        """Whether the memory is gone."""
        ...


def memory_of(tensor: torch.Tensor) -> Memory | None:
    """The memory of ``tensor``, or ``None`` for one without a storage."""
    try:
        return cast("Memory", StorageWeakRef(tensor.untyped_storage()))
    except (NotImplementedError, RuntimeError):  # sparse tensors, and those of other back ends
        return None


def asked_for(name: str, args: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    """What the program has called, and with what, where one put over it has called ``name``."""
    # Not this frame: a frame that holds itself keeps the tensors of all its callers alive.
    frame: FrameType | None = getattr(inspect.currentframe(), "f_back", None)
    while frame is not None:
        library = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if library == "preamp":
            own: Mapping[str, Any] = frame.f_locals
            fn = own.get("fn")
            # Helpers have a `fn` as well, which is preamp's own.
            if callable(fn) and _library_of(fn) != "preamp":
                name = getattr(fn, "__name__", name)
                args = (*own.get("args", args), *own.get("kwargs", {}).values())
        elif library != "torch":
            break
        frame = frame.f_back
    return name.strip("_"), args


def _library_of(function: object) -> str:
    return str(getattr(function, "__module__", "")).partition(".")[0]


def unheard() -> AbstractContextManager[None]:
    """Let functions be called without any mode hearing of them."""
    return cast("Any", torch)._C.DisableTorchFunction()


class OperationMode(TorchFunctionMode):
    """Tells of each function that was called on this thread, its arguments and its result."""

    def __init__(self, tell: Callable[[str, Sequence[Any], Any], None]) -> None:
        """Tell nothing before `enter`."""
        super().__init__()
        self._tell = tell
        self.is_on = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` and tell of it; of attributes that are read only if they are tensors."""
        name = getattr(func, "__name__", "")
        result = func(*args, **(kwargs or {}))
        is_number = name == _READ and not isinstance(result, torch.Tensor)
        if not is_number and not may_not_be_read():
            self._tell(name, (*args, *kwargs.values()) if kwargs else args, result)
        return result

    def enter(self) -> None:
        """Begin, on this thread, below all modes of the program, which may end before this one."""
        if self.is_on:
            return
        self.is_on = True
        stack: Sequence[Any] = _overrides._get_current_function_mode_stack()
        # torch wants that of a default device to be the lowest of all.
        default = getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)
        above = [_overrides._pop_mode() for mode in stack if mode is not default]
        _push((self, *reversed(above)))

    def leave(self) -> None:
        """End, also where others have begun since and not ended; those go on."""
        self.is_on = False
        above: list[Any] = []
        if self in _overrides._get_current_function_mode_stack():
            while (top := _overrides._pop_mode()) is not self:
                above.append(top)
            _push(reversed(above))


def _push(modes: Iterable[Any]) -> None:
    """Put them on again, but those of ours that have ended while torch or we had taken them off.

    Objects of a dropped engine may be collected in the midst of any function.
    """
    for mode in modes:
        if not isinstance(mode, OperationMode) or mode.is_on:
            _overrides._push_mode(mode)
