# SPDX-License-Identifier: BSD-3-Clause
"""Wrappers that take an optimizer's class, and so miss the methods that its instance has."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch

from preamp.engine.engine import Engine
from preamp.engine.lookup import bare


def serve_imitations(engine: Engine) -> None:
    """Let wrappers that derive from an optimizer's class call what `OptimizerHooks` put on it.

    Those of Lightning and Fabric find a method that they do not define in the class, so that
    ``zero_grad`` would leave half gradients where they are. Until the engine is closed the
    optimizer's class is a subclass of its own, of the same name.

    Mutates:
        The class of each optimizer of ``engine``, for wrappers made later.
    """
    for optimizer in engine.optimizers:
        kind: Any = type(optimizer)
        if not issubclass(kind, _Imitated):
            own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
            engine.undo.push(partial(setattr, optimizer, "__class__", kind))
            setattr(optimizer, "__class__", type(kind.__name__, (_Imitated, kind), own))  # noqa: B010


class _Imitated(torch.optim.Optimizer):
    """What comes before an optimizer's class, and knows the wrapper from the optimizer."""

    def zero_grad(self, *args: Any, **kwargs: Any) -> Any:
        inner = bare(self)
        return (super() if inner is self else inner).zero_grad(*args, **kwargs)

    def add_param_group(self, *args: Any, **kwargs: Any) -> Any:
        inner = bare(self)
        return (super() if inner is self else inner).add_param_group(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the optimizer under the class that its file's reader has."""
        made = cast("Any", super().__reduce_ex__(protocol))
        _, own, kind, *_ = type(self).__mro__
        return (object.__new__, (kind,), *made[2:]) if own is _Imitated else made
