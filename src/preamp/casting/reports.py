# SPDX-License-Identifier: BSD-3-Clause
"""Print what is cast, where ``verbosity=2`` asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from preamp.casting.autocast_state import CASTABLE
from preamp.casting.patches import PATCH_LOCK
from preamp.core.log import say
from preamp.core.pytree import tensors_in
from preamp.core.undo import UndoStack

_NAMES: Final = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
_asking: frozenset[object] = frozenset()  # who has casts of the process printed; replaced


def print_casts(undo: UndoStack) -> None:
    """Print every cast of the process on the thread that casts, until ``undo``.

    A weight is told of in each call, also where autocast's cache holds its cast already. Compiled
    code tells nothing: what it casts was decided when it was compiled.
    """
    one = {object()}

    @PATCH_LOCK.held
    def end() -> None:
        global _asking
        _asking -= one

    @PATCH_LOCK.held
    def begin() -> None:
        global _asking
        _asking |= one

    undo.push(end)
    begin()


def tell(function: str, source: torch.dtype, target: torch.dtype, note: str = "") -> None:
    """Print one line, in Apex's words: ``Float->Half (linear)``.

    ``note`` says what became of a constant that half cannot hold.
    """
    if _asking:
        say(f"{_NAMES[source]}->{_NAMES[target]} ({function}{note and f': {note}'})")


def tell_casts(function: str, values: Sequence[Any], target: torch.dtype, device_type: str) -> None:
    """Tell of each tensor that ``function`` is about to cast to ``target``."""
    # In this order: what is being compiled must not depend on who asks.
    if torch.compiler.is_compiling() or not _asking:
        return
    for tensor in tensors_in(values):
        source = tensor.dtype
        if source in CASTABLE and source is not target and tensor.device.type == device_type:
            tell(function, source, target)
