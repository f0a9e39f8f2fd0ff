# SPDX-License-Identifier: BSD-3-Clause
"""Tell who listens what is cast: ``verbosity=2`` prints it, audits count it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from preamp.casting.autocast_state import CASTABLE
from preamp.core.log import say
from preamp.core.pytree import tensors_in
from preamp.core.undo import UndoStack, append

_NAMES: Final = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


@dataclass(frozen=True, slots=True)
class Cast:
    """One tensor that is about to be cast."""

    function: str  # whose argument it is
    source: torch.dtype  # its dtype
    target: torch.dtype  # the dtype that the function gets
    elements: int  # how many there are


Listener = Callable[[Cast], None]
_listeners: Final[list[tuple[Listener, object]]] = []  # of the process


def listen(listener: Listener, undo: UndoStack) -> None:
    """Call ``listener`` once with every cast, on the thread that casts, until ``undo``.

    Whoever else has it listen too keeps it listening. A weight is told of in each call, also where
    autocast's cache holds its cast already. Compiled code tells nothing: what it casts was decided
    when it was compiled.
    """
    append(_listeners, (listener, object()), undo)


def say_cast(made: Cast) -> None:
    """Print one line, in Apex's words: ``Float->Half (linear)``."""
    say(f"{_NAMES[made.source]}->{_NAMES[made.target]} ({made.function})")


def tell_casts(function: str, values: Sequence[Any], target: torch.dtype, device_type: str) -> None:
    """Tell of each tensor that ``function`` is about to cast to ``target``."""
    # In this order: what is being compiled must not depend on who listens.
    if torch.compiler.is_compiling() or not _listeners:
        return
    listeners = dict.fromkeys([listener for listener, _ in _listeners])
    for tensor in tensors_in(values):
        source = tensor.dtype
        if source in CASTABLE and source is not target and tensor.device.type == device_type:
            made = Cast(function, source, target, tensor.numel())
            for listener in listeners:
                listener(made)
