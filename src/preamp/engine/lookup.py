# SPDX-License-Identifier: BSD-3-Clause
"""What a script passes, and where it leads: wrapped optimizers, engines, parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch

from preamp.core.errors import bad_state, with_article
from preamp.core.link import ATTRIBUTE, Link
from preamp.engine.engine import Engine
from preamp.optim import LARC

# DistributedDataParallel and DataParallel; torch.compile; Fabric
_WRAPPED_IN = ("module", "_orig_mod", "_forward_module")


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside a `LARC` or a framework's wrapper; anything else as it is.

    The wrappers of Accelerate, Lightning and Fabric forward to an optimizer whose groups and state
    are the very same objects. One with state of its own, as Lookahead has, is an optimizer by
    itself; one that tells of its ``overflow`` scales by itself.
    """
    if isinstance(optimizer, LARC):
        return bare(optimizer.optim)
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or hasattr(optimizer, "overflow"):
        return optimizer
    groups, state = inner.param_groups, inner.state
    is_same = getattr(optimizer, "param_groups", None) is groups
    return bare(inner) if is_same and getattr(optimizer, "state", state) is state else optimizer


def find_engine(thing: Any) -> Engine | None:
    """Return the open engine of a model or optimizer, or ``None``.

    A model wrapped in DistributedDataParallel, DataParallel or ``torch.compile`` is looked into,
    and so are `LARC` and what frameworks wrap optimizers in.
    """
    thing = bare(thing)
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    if isinstance(own.get(ATTRIBUTE), Link):
        target = cast("Link[object]", own[ATTRIBUTE]).target
        if isinstance(target, Engine):
            return target
    modules: Any = own.get("_modules", {})  # of a ScriptModule no dict
    for name in _WRAPPED_IN:
        if name in modules and modules[name] is not None:
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
        raise bad_state(
            f"This {type(thing).__name__} has no engine",
            "Models and optimizers have one from preamp.initialize until Engine.close",
            "Pass it to preamp.initialize first, and keep the same object",
        )
    return engine


def as_optimizers(optimizers: Any, who: str = "scale_loss") -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list, a single one too; wrapped ones are taken out."""
    single = bare(optimizers)
    if isinstance(single, torch.optim.Optimizer) or not isinstance(optimizers, Iterable):
        return [single]
    members = [bare(optimizer) for optimizer in cast("Iterable[Any]", optimizers)]
    if not members:
        raise bad_state(
            f"{who} was given no optimizer",
            "It needs every optimizer whose parameters get gradient from the loss",
            "Pass the optimizer that preamp.initialize returned, or a list of them",
        )
    return members


def common_engine(
    optimizers: Sequence[Any], who: str = "scale_loss", initialize: str = "preamp.initialize"
) -> Engine:
    """Return the one engine that owns all ``optimizers``, which ``who`` was given.

    ``initialize`` is the name by which the script knows it, for the errors.
    """
    engines = list(map(find_engine, optimizers))
    first = engines[0]
    for optimizer, engine in zip(optimizers, engines, strict=True):
        if engine is None:
            raise bad_state(
                f"{who} was given {with_article(type(optimizer).__name__)} that was not "
                "initialized",
                f"It takes optimizers that went through {initialize}",
                f"Call model, optimizer = {initialize}(model, optimizer, opt_level=…) "
                "before the training loop",
            )
        if engine is not first:
            raise bad_state(
                f"{who} was given optimizers of different engines",
                "One backward has one loss scale, so its optimizers must come from one "
                f"{initialize} call",
                f"Initialize them together: {initialize}([model_a, model_b], "
                "[optimizer_a, optimizer_b], …)",
            )
    return cast("Engine", first)  # there is an optimizer, and the loop has raised for others


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


def master_params(optimizer: torch.optim.Optimizer) -> Iterator[torch.nn.Parameter]:
    """Yield every parameter that ``optimizer`` updates: masters, and float32 parameters.

    After ``scale_loss`` their ``grad`` is unscaled, so this is what to clip by hand:
    ``torch.nn.utils.clip_grad_norm_(preamp.master_params(optimizer), max_norm)``. Reading the
    ``grad`` of a master makes it; `preamp.clip_grad_norm_` clips without.

    Args:
        optimizer: Any optimizer, initialized or not.
    """
    for group in optimizer.param_groups:
        yield from group["params"]
