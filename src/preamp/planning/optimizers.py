# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer, however it is named, as a function from parameters to an optimizer."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from preamp.core.errors import bad_type, bad_value
from preamp.optim.fused import every as fused

_FORM = (
    "A factory is written package.module:name, or package.module:name(10, bias=False) with "
    "numbers, strings, True, False, None, and lists, tuples and dicts of them as arguments"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function by its place, and what to call it with.

    Attributes:
        module: Dotted module; empty where the text named none.
        name: Dotted name inside of it.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    module: str
    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])

    def import_function(self) -> Callable[..., Any]:
        """Import the module and return the function in it.

        Raises `ValueError` if the text named no module, or there is no such module or name, or it
        cannot be called.
        """
        if not self.module:
            raise _malformed(self.name)
        try:
            found: Any = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise bad_value(
                f"Cannot import {self.module}:{self.name}: {error}",
                _FORM,
                "Check the spelling, and that the module is on PYTHONPATH",
            ) from error
        if not callable(found):
            raise bad_value(f"{self.module}:{self.name} cannot be called", _FORM, "Name a function")
        return found


def parse_call(text: str) -> Call:
    """Read a factory and its arguments; nothing is imported or run.

    Such as ``"torch.nn:Linear(10, 20, bias=False)"`` or ``"AdamW(lr=1e-3)"``. Raises `ValueError`
    for another form, or an argument that is no literal.
    """
    place, bracket, rest = text.strip().partition("(")
    module, _, name = place.rpartition(":")
    if not all(part.isidentifier() for part in (*name.split("."), *module.split(".")) if part):
        raise _malformed(text)
    if not name or (bracket and not rest.endswith(")")):
        raise _malformed(text)
    if not bracket:
        return Call(module=module, name=name)
    try:
        node = ast.parse(f"f({rest}", mode="eval").body
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            raise _malformed(text)
        args = tuple(ast.literal_eval(item) for item in node.args)
        kwargs = {str(item.arg): ast.literal_eval(item.value) for item in node.keywords if item.arg}
    except (SyntaxError, ValueError) as error:
        raise _malformed(text) from error
    if len(kwargs) != len(node.keywords):
        raise _malformed(text)
    return Call(module=module, name=name, args=args, kwargs=kwargs)


def _malformed(text: str) -> ValueError:
    return bad_value(
        f"{text!r} does not name a factory",
        _FORM,
        'Write for example "torch.nn:Linear(10, 20)"',
    )


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
    raise bad_type(
        f"Got {type(optimizer).__name__} in place of an optimizer",
        "Allowed are a name such as 'AdamW', a class, a function of the parameters, an "
        "optimizer, or None",
        "Pass for example optimizer='FusedAdam'",
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
        raise bad_value(
            f"The optimizer {text!r} is not known",
            f"Known by name are {', '.join(NAMES)}",
            "Write others as package.module:Name",
        )
    if call.args:
        raise bad_value(
            f"{text!r} has arguments without a name",
            "Arguments of an optimizer are written name=value",
            f"Write for example {call.name}(lr=0.1)",
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
