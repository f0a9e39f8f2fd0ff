# SPDX-License-Identifier: BSD-3-Clause
"""Collectives that a script runs on weights, such as a broadcast or an average between steps.

Torch counts no write of theirs, so without this the next step would restore the old weights.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from preamp.casting.patches import PATCHES, Rank
from preamp.core.pytree import tensors_in
from preamp.core.ranks import collectives, tells_some
from preamp.core.undo import UndoStack

if TYPE_CHECKING:
    from collections.abc import Callable

    from preamp.engine.core import EngineCore


def listen_to_collectives(engine: EngineCore, undo: UndoStack) -> None:
    """Note weights and masters that a collective is about to write to, until ``undo``.

    It costs a collective one call of Python, and nothing else anything. Where torch is listened to
    lie all calls from Python, however a script has imported them. What torch does in C++, as its
    `DistributedDataParallel` does, or in compiled code, is not heard of.
    """
    own = weakref.ref(engine)  # which ends what it has patched when it is collected

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            target = own()
            is_read = method.__name__ == "broadcast" and tells_some(group, args, kwargs)
            if target is not None and not is_read:
                _note(target, args[0] if args else kwargs)
            return method(group, *args, **kwargs)

        return collective

    for owner, name in collectives():
        PATCHES.add(owner, name, Rank.PROBE, wrap, undo)


def _note(engine: EngineCore, written: Any) -> None:
    tensors = list(tensors_in(written))
    for session in engine.sessions.values():
        for table in session.gradients.tables:
            table.expect_collective(tensors)
