# SPDX-License-Identifier: BSD-3-Clause
"""Collectives that a script runs on weights, such as a broadcast or an average between steps.

Torch counts no write of theirs, so without this the next step would restore the old weights.
"""

from __future__ import annotations

import functools
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from preamp.casting.patches import PATCHES, Rank, SharedInstall
from preamp.core.pytree import tensors_in
from preamp.core.ranks import collectives, tells_some
from preamp.core.undo import UndoStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from preamp.engine.core import EngineCore

_listening: Final[dict[object, weakref.ref[EngineCore]]] = {}  # weak: engines can be collected


def listen_to_collectives(engine: EngineCore, undo: UndoStack) -> None:
    """Note weights and masters that a collective is about to write to, until ``undo``.

    It costs a collective a few microseconds for each engine, and nothing else anything. All calls
    from Python are heard of, however a script has imported the function. What torch does in C++, as
    its `DistributedDataParallel` does, or in compiled code, is not.
    """
    key = object()
    undo.push(partial(_listening.pop, key, None))
    _listening[key] = weakref.ref(engine)
    _PATCHES.acquire(undo)


def _patch(undo: UndoStack) -> None:
    for owner, name in collectives():
        PATCHES.add(owner, name, Rank.PROBE, _heard, undo)


_PATCHES: Final = SharedInstall(_patch)


def _heard(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not (method.__name__ == "broadcast" and tells_some(group, args, kwargs)):
            _note(args[0] if args else kwargs)
        return method(group, *args, **kwargs)

    return collective


def _note(written: Any) -> None:
    tensors = list(tensors_in(written))
    for ref in list(_listening.values()):
        engine = ref()
        for session in () if engine is None else engine.sessions.values():
            for table in session.gradients.tables:
                table.expect_collective(tensors)
