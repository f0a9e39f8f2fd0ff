# SPDX-License-Identifier: BSD-3-Clause
"""The user's own rules: ``register_*`` for functions elsewhere, decorators for one's own.

A rule on a C function holds for the whole call: torch's autocast is off inside, so it cannot cast
back. A rule on a Python function casts the arguments only, and what the body calls keeps its own
rules, as with Apex; except that a float rule lets the body of a banned function run, which CUDA's
autocast would refuse whatever its arguments.
"""

from __future__ import annotations

import functools
from types import BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType
from typing import Any, TypeVar, cast

import torch

from preamp.casting import mixed
from preamp.casting.functions import FUNCTION_CASTS
from preamp.casting.op_lists import OP_TABLE
from preamp.casting.patches import PATCHES, Rank, Wrapper, wrap_raw
from preamp.casting.wrappers import AnyFunction, CastRule, wrap_cast
from preamp.core.errors import bad_type, bad_value
from preamp.core.undo import UndoStack
from preamp.kernels import wide_half

Fn = TypeVar("Fn")

_C_FUNCTIONS = (BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType)
_LAYERS = (wide_half.__name__, mixed.__name__)
_BANNED = frozenset((row.namespace, row.name) for row in OP_TABLE if row.rule == "banned")


def _is_c_function(fn: Any) -> bool:
    # Layers of wide products and half models lie between a registration and its function.
    while getattr(fn, "__globals__", {}).get("__name__") in _LAYERS:
        fn = fn.__wrapped__
    return isinstance(fn, _C_FUNCTIONS)


def _cast(rule: CastRule, fn: AnyFunction, half: torch.dtype | None = None) -> AnyFunction:
    is_banned = (getattr(fn, "__module__", None), getattr(fn, "__name__", None)) in _BANNED
    is_closed = _is_c_function(fn) or (rule == "float" and is_banned)
    return wrap_cast(rule, is_closed=is_closed, half=half)(fn)


_half = functools.partial(_cast, "half")
_bfloat16 = functools.partial(_cast, "half", half=torch.bfloat16)
_float = functools.partial(_cast, "float")
_promote = functools.partial(_cast, "promote")


def _register(module: Any, name: str, caller: str, wrap: Wrapper) -> None:
    if not hasattr(module, name):
        label = getattr(module, "__name__", type(module).__name__)
        raise bad_value(
            f"{caller}({label}, {name!r}): there is no such attribute",
            f"The name must be one that {label} has now",
            "Check the spelling, and that the module that defines it has been imported",
        )
    try:  # now, since what cannot be wrapped would fail every later engine
        if not callable(getattr(module, name)):
            raise TypeError("it is not callable")
        undo = UndoStack()
        try:
            PATCHES.add(module, name, Rank.REGISTERED, wrap, undo)
        finally:
            undo.unwind()
    except (AttributeError, TypeError) as error:
        raise bad_type(
            f"{caller}({module!r}, {name!r}): this attribute cannot be replaced ({error})",
            "It must be a function in a Python module, class or instance",
            "Register it where your program looks it up, such as torch or torch.Tensor",
        ) from error
    add = functools.partial(PATCHES.add, module, name, Rank.REGISTERED, wrap)
    FUNCTION_CASTS.extend((id(module), name), add)


def register_half_function(module: Any, name: str) -> None:
    """Run ``module.name`` in the half dtype wherever casts are active.

    Takes effect at once where an engine is alive, else with the next one, and for all later ones;
    the rule replaces the table's. Registering a name again replaces the earlier registration.

    Args:
        module: A module, class or instance.
        name: The function's attribute name.

    Raises:
        ValueError: ``module`` has no attribute ``name``.
        TypeError: The attribute is no function, or cannot be replaced, as those of C's types.
    """
    _register(module, name, "register_half_function", _half)


def register_bfloat16_function(module: Any, name: str) -> None:
    """Run ``module.name`` in bfloat16; otherwise as ``register_half_function``."""
    _register(module, name, "register_bfloat16_function", _bfloat16)


def register_float_function(module: Any, name: str) -> None:
    """Run ``module.name`` in float32; otherwise as ``register_half_function``.

    Example:
        >>> register_float_function(torch, "sigmoid")
    """
    _register(module, name, "register_float_function", _float)


def register_promote_function(module: Any, name: str) -> None:
    """Cast half arguments of ``module.name`` to float32 where they are mixed with float32.

    Otherwise as ``register_half_function``.
    """
    _register(module, name, "register_promote_function", _promote)


def half_function(fn: Fn) -> Fn:
    """Decorate ``fn`` so that its tensor arguments are cast to the half dtype where casts are on.

    ``fn`` is a function, method, C function, or static or class method.
    """
    return cast("Fn", wrap_raw(fn, _half))


def bfloat16_function(fn: Fn) -> Fn:
    """Decorate ``fn`` as `half_function` does, but always cast to bfloat16."""
    return cast("Fn", wrap_raw(fn, _bfloat16))


def float_function(fn: Fn) -> Fn:
    """Decorate ``fn`` so that its half tensor arguments are cast to float32 where casts are on."""
    return cast("Fn", wrap_raw(fn, _float))


def promote_function(fn: Fn) -> Fn:
    """Decorate ``fn`` so that half mixed with float32 arrives as float32 where casts are on."""
    return cast("Fn", wrap_raw(fn, _promote))
