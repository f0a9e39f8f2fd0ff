# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer, however it is named, as a function from parameters to an optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch

from preamp.core.errors import message
from preamp.optim.fused import every as fused
from preamp.planning.calls import parse_call

Make = Callable[[Any], torch.optim.Optimizer]
OptimizerLike = str | Make | torch.optim.Optimizer
_DEFAULT_LR = 1e-3  # for classes that want one to be named; no size depends on it

NAMES = tuple(
    name
    for room in (fused, torch.optim)
    for name, kind in sorted(vars(room).items())
    if inspect.isclass(kind)
    and issubclass(kind, torch.optim.Optimizer)
    and kind is not torch.optim.Optimizer
)
"""What may stand for an optimizer by itself: preamp's fused ones, and torch's."""


def optimizer_factory(optimizer: OptimizerLike) -> Make:
    """Return what makes such an optimizer over other parameters.

    Given is a name in `NAMES`, with arguments if need be (``"SGD(lr=0.1, momentum=0.9)"``);
    ``"package.module:Name(...)"``; a class or other function of the parameters; or an optimizer, of
    whose class another one is made with the same options. Raises `ValueError` for another name or
    form, `TypeError` for anything else.
    """
    if isinstance(optimizer, str):
        return _named(optimizer)
    if isinstance(optimizer, torch.optim.Optimizer):
        return _again(optimizer)
    if callable(optimizer):
        return _complete(optimizer, {})
    raise TypeError(
        message(
            f"Got {type(optimizer).__name__} in place of an optimizer",
            "Allowed are a name such as 'AdamW', a class, a function of the parameters, an "
            "optimizer, or None",
            "Pass for example optimizer='FusedAdam'",
        )
    )


def name_of(optimizer: OptimizerLike | None) -> str:
    """The word that reports have for it."""
    if optimizer is None:
        return "none"
    if isinstance(optimizer, str):
        return parse_call(optimizer).name.rpartition(".")[2]
    if isinstance(optimizer, torch.optim.Optimizer):
        return type(optimizer).__name__
    function = getattr(optimizer, "func", optimizer)
    return str(getattr(function, "__name__", type(function).__name__))


def _named(text: str) -> Make:
    call = parse_call(text)
    if call.module:
        kind: Any = call.import_function()
    elif call.name in NAMES:
        kind = getattr(fused, call.name, None) or getattr(torch.optim, call.name)
    else:
        raise ValueError(
            message(
                f"The optimizer {text!r} is not known",
                f"Known by name are {', '.join(NAMES)}",
                "Write others as package.module:Name",
            )
        )
    if call.args:
        raise ValueError(
            message(
                f"{text!r} has arguments without a name",
                "Arguments of an optimizer are written name=value",
                f"Write for example {call.name}(lr=0.1)",
            )
        )
    return _complete(kind, call.kwargs)


def _complete(kind: Callable[..., torch.optim.Optimizer], kwargs: dict[str, Any]) -> Make:
    """Add a learning rate where it is wanted and not given."""
    options = dict(kwargs)
    lr = inspect.signature(kind).parameters.get("lr")
    if lr is not None and "lr" not in options and _is_required(lr):
        options["lr"] = _DEFAULT_LR
    return lambda params: kind(params, **options)


def _is_required(parameter: inspect.Parameter) -> bool:
    # FusedSGD's and FusedLARS's default is torch's own mark for "must be given".
    default: Any = parameter.default
    return default is inspect.Parameter.empty or not (
        default is None or isinstance(default, (int, float, torch.Tensor))
    )


def _again(optimizer: torch.optim.Optimizer) -> Make:
    kind = type(optimizer)
    accepted = [name for name in inspect.signature(kind).parameters if name != "params"]
    options: dict[str, Any] = {}
    for name in accepted:
        if name in optimizer.defaults:
            options[name] = optimizer.defaults[name]
        elif hasattr(optimizer, name):
            options[name] = getattr(optimizer, name)
    return _complete(kind, copy.deepcopy(options))
