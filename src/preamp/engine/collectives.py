# SPDX-License-Identifier: BSD-3-Clause
"""Collectives that a script runs on weights, such as a broadcast or an average between steps.

Torch counts no write of theirs, so without this the next step would restore the old weights.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

from preamp.casting.patches import PATCHES, Rank, SharedInstall
from preamp.core.pytree import tensors_in
from preamp.core.ranks import collectives, tells_some
from preamp.engine.engine import engines_in_use

if TYPE_CHECKING:
    from collections.abc import Callable

    from preamp.core.undo import UndoStack


def _patch(undo: UndoStack) -> None:
    for owner, name in collectives():
        PATCHES.add(owner, name, Rank.PROBE, _heard, undo)


COLLECTIVES: Final = SharedInstall(_patch)
"""While it is held, weights and masters that a collective is about to write to are noted.

It costs a collective a few microseconds for each engine, and nothing else anything. All calls from
Python are heard of, however a script has imported the function. What torch does in C++, as its
`DistributedDataParallel` does, or in compiled code, is not.
"""


def _heard(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        if not (method.__name__ == "broadcast" and tells_some(group, args, kwargs)):
            _note(args[0] if args else kwargs)
        return method(group, *args, **kwargs)

    return collective


def _note(written: Any) -> None:
    tensors = list(tensors_in(written))
    for engine in engines_in_use():
        for session in engine.sessions.values():
            for table in session.tables:
                table.expect_collective(tensors)
