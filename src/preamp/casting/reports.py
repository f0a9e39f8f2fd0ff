# SPDX-License-Identifier: BSD-3-Clause
"""Tell what is cast: the layer that ``verbosity=2`` and audits put on top of all others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from preamp.casting.patches import PATCH_LOCK, Wrapper
from preamp.casting.wrappers import (
    CASTABLE,
    AnyFunction,
    device_to_cast_on,
    is_mixed,
    is_of_others,
    widens_others,
)
from preamp.core.log import say
from preamp.core.pytree import tensors_in
from preamp.core.undo import UndoStack

CastRule = Literal["half", "float", "promote", "sequence_promote"]

_NAMES: Final = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


@dataclass(frozen=True, slots=True)
class Cast:
    """One tensor that is about to be cast, or a constant that is clamped to a half format."""

    function: str  # whose argument it is
    source: torch.dtype  # its dtype
    target: torch.dtype  # the dtype that the function gets
    elements: int  # how many there are
    note: str = ""  # of a constant that half cannot hold: what became of it


Listener = Callable[[Cast], None]
_listeners: tuple[Listener, ...] = ()  # process-wide, as the patches are; replaced, never changed


def listen(listener: Listener, undo: UndoStack) -> None:
    """Call ``listener`` with every cast, on the thread that casts, while reports are installed."""

    @PATCH_LOCK.held
    def end() -> None:
        global _listeners
        _listeners = tuple(other for other in _listeners if other is not listener)

    @PATCH_LOCK.held
    def begin() -> None:
        global _listeners
        _listeners = (*_listeners, listener)

    undo.push(end)
    begin()


def say_cast(made: Cast) -> None:
    """Print one line, in Apex's words: ``Float->Half (linear)``."""
    note = f": {made.note}" if made.note else ""
    say(f"{_NAMES[made.source]}->{_NAMES[made.target]} ({made.function}{note})")


def tell(made: Cast) -> None:
    """Tell all who listen."""
    for listener in _listeners:
        listener(made)


def wrap_report(rule: CastRule, dtype: torch.dtype | None = None) -> Wrapper:
    """Tell the listeners of each tensor that the function below will cast; casts nothing itself.

    A weight is told of in each call, also where autocast's cache holds its cast already. Compiled
    code tells nothing: what it casts was decided when it was compiled. Without ``dtype`` a
    ``half`` rule casts to the dtype active where it is called.
    """

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def reported(*args: Any, **kwargs: Any) -> Any:
            # In this order: what is being compiled must not depend on who listens.
            if not torch.compiler.is_compiling() and _listeners:
                for made in _casts(fn.__name__, rule, dtype, args, kwargs):
                    tell(made)
            return fn(*args, **kwargs)

        return reported

    return wrap


def _casts(
    function: str,
    rule: CastRule,
    dtype: torch.dtype | None,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Iterator[Cast]:
    device = device_to_cast_on(args, kwargs)
    values: Sequence[Any] = (*args, *kwargs.values())
    if device is None:
        return
    if is_of_others(values, device) and not (rule == "float" and widens_others()):
        return
    if rule == "half":
        target = dtype or torch.get_autocast_dtype(device)
    else:
        target = torch.float32
    if rule == "sequence_promote":
        values = args[0] if args else kwargs.get("tensors", ())
    if rule in ("promote", "sequence_promote") and not is_mixed(values):
        return
    for tensor in tensors_in(values):
        if tensor.dtype in CASTABLE and tensor.dtype is not target and tensor.device.type == device:
            yield Cast(function, tensor.dtype, target, tensor.numel())
