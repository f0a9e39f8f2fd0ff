# SPDX-License-Identifier: BSD-3-Clause
"""From a model or an optimizer to its engine."""

from __future__ import annotations

from typing import Any, cast

from preamp.core.errors import PreampStateError, message
from preamp.core.link import Link
from preamp.engine.engine import Engine
from preamp.optim import LARC

ATTRIBUTE = "_preamp_link"
"""Name of the attribute that holds the link, on models and optimizers."""

_WRAPPED_IN = ("module", "_orig_mod")  # DistributedDataParallel and DataParallel; torch.compile


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside a `LARC`; anything else as it is."""
    return optimizer.optim if isinstance(optimizer, LARC) else optimizer


def find_engine(thing: Any) -> Engine | None:
    """Return the open engine of a model or optimizer, or ``None``.

    A model wrapped in DistributedDataParallel, DataParallel or ``torch.compile`` is looked into,
    and so is `LARC`.
    """
    thing = bare(thing)
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    if isinstance(own.get(ATTRIBUTE), Link):
        target = cast("Link[object]", own[ATTRIBUTE]).target
        if isinstance(target, Engine):
            return target
    modules: dict[str, Any] = own.get("_modules", {})
    for name in _WRAPPED_IN:
        if modules.get(name) is not None:
            return find_engine(modules[name])
    return None


def engine_of(thing: Any) -> Engine:
    """Return the engine that ``preamp.initialize`` made for a model or an optimizer.

    Args:
        thing: A model or optimizer given to ``initialize``; wrappers are looked through.

    Raises:
        PreampStateError: It has none: it never had, or its engine was closed.
    """
    engine = find_engine(thing)
    if engine is None:
        raise PreampStateError(
            message(
                f"This {type(thing).__name__} has no engine",
                "Models and optimizers have one from preamp.initialize until Engine.close",
                "Pass it to preamp.initialize first, and keep the same object",
            )
        )
    return engine
