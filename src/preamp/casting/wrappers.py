# SPDX-License-Identifier: BSD-3-Clause
"""The callables that replace a function: one maker for rules that cast, and one for each other.

All of them look at torch's autocast state when called, then whether thread-wide casts act, and else
pass the call through. Before the latter they are plain Python without thread-local look-ups, so
``torch.compile`` traces them. Both half dtypes are cast, as in Apex; float64, widened by the user,
never.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, cast

import torch

from preamp.casting.autocast_state import CASTABLE, casting_device
from preamp.casting.patches import Wrapper
from preamp.casting.reports import tell_casts
from preamp.casting.thread_casts import PUSHED, call_in_thread_casts
from preamp.core.dtypes import HALF_DTYPES, dtype_name, is_half
from preamp.core.errors import worded
from preamp.core.pytree import map_tensors
from preamp.kernels.wide_half import leaves

CastRule = Literal["half", "float", "promote", "sequence_promote"]
AnyFunction = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def cast_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype, device_type: str
) -> Arguments:
    """The arguments with half and float32 tensors on ``device_type`` cast to ``dtype``."""

    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        source = tensor.dtype
        if source is dtype or source not in CASTABLE or tensor.device.type != device_type:
            return tensor
        return tensor.to(dtype)

    def cast_all(value: Any) -> Any:
        if isinstance(value, torch.Tensor):  # as most are
            return cast_one(value)
        return map_tensors(cast_one, value) if isinstance(value, (list, tuple)) else value

    return (
        tuple([cast_all(value) for value in args]),
        {name: cast_all(value) for name, value in kwargs.items()},
    )


def _wrap(fn: AnyFunction, act: Callable[[str, Any, Any], Any]) -> AnyFunction:
    """What calls ``act`` with the device type, ``args`` and ``kwargs`` where casts are active."""

    @functools.wraps(fn)
    def casting(*args: Any, **kwargs: Any) -> Any:
        device = casting_device(args, kwargs)
        if device is not None:
            return act(device, args, kwargs)
        if PUSHED and kwargs.get("out") is None:
            tensors = leaves((*args, *kwargs.values()))
            if any([tensor.dtype in CASTABLE for tensor in tensors]):
                return call_in_thread_casts(casting, fn, args, kwargs)
        return fn(*args, **kwargs)

    return casting


def _without_casts(
    fn: AnyFunction, args: Sequence[Any], kwargs: Mapping[str, Any], device_type: str
) -> Any:
    """Call ``fn`` with autocast off on ``device_type``."""
    with torch.autocast(device_type, enabled=False):
        return fn(*args, **kwargs)


def is_mixed(values: Iterable[Any]) -> bool:
    """Whether there are half and float32 tensors but no float64 among ``values``."""
    has_half = has_float32 = False
    for value in values:
        if isinstance(value, torch.Tensor):
            dtype = value.dtype
            if dtype is torch.float32:
                has_float32 = True
            elif dtype in HALF_DTYPES:
                has_half = True
            elif dtype is torch.float64:
                return False
    return has_half and has_float32


def wrap_cast(
    rule: CastRule,
    *,
    native: frozenset[str] = frozenset(),
    is_closed: bool = False,
    half: torch.dtype | None = None,
) -> Wrapper:
    """Cast arguments by ``rule``, or leave that to autocast on ``native`` devices.

    Inside of a function that ``is_closed`` autocast is off. ``half`` defaults to the active dtype.
    What torch promotes by itself (float64, two half dtypes) is its own.
    """

    def wrap(fn: AnyFunction) -> AnyFunction:
        def act(device: str, args: Any, kwargs: Any) -> Any:
            values: Sequence[Any] = (*args, *kwargs.values())
            target, off = torch.float32, is_closed
            if rule == "half":
                target = half or torch.get_autocast_dtype(device)
            elif rule == "sequence_promote":
                items = args[0] if args else kwargs.get("tensors")
                values = cast("list[Any]", items) if isinstance(items, (list, tuple)) else ()
                active = torch.get_autocast_dtype(device)  # it may refuse to join the other half
                off = any([is_half(t) and t.dtype is not active for t in leaves(values)])
            if rule in ("half", "float") or is_mixed(values):
                tell_casts(fn.__name__, values, target, device)
                if device not in native:
                    args, kwargs = cast_arguments(args, kwargs, target, device)
            return _without_casts(fn, args, kwargs, device) if off else fn(*args, **kwargs)

        casting = _wrap(fn, act)
        if rule != "promote" or is_closed:
            return casting

        @functools.wraps(fn)
        def promoting(*args: Any, **kwargs: Any) -> Any:
            # Looking at the dtypes first is cheaper than asking for the autocast state, and
            # nearly every sum and product in a program ends here.
            if not (is_mixed(args) or (kwargs and is_mixed((*args, *kwargs.values())))):
                return fn(*args, **kwargs)
            return casting(*args, **kwargs)

        return promoting

    return wrap


def wrap_banned(fn: AnyFunction) -> AnyFunction:
    """Rule ``banned``; float32 arguments are fine, also where autocast itself would refuse."""

    def act(device: str, args: Any, kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        halves = [a for a in values if isinstance(a, torch.Tensor) and is_half(a)]
        if halves:
            raise worded(
                NotImplementedError,
                f"{fn.__name__} got a {dtype_name(halves[0].dtype)} tensor while casts are active",
                "It takes float32 here, because the logarithm of a half-precision "
                "probability is infinite once the probability rounds to 0 or 1",
                "Use torch.nn.BCEWithLogitsLoss on the logits, or call "
                "register_float_function(torch, 'sigmoid') so that the probabilities "
                "are float32, or, where they stay clear of 0 and 1, "
                f"register_float_function(torch.nn.functional, {fn.__name__!r}) to have "
                "them cast here",
            )
        return _without_casts(fn, args, kwargs, device)

    return _wrap(fn, act)


def wrap_in_place(*, refuse_half: bool) -> Wrapper:
    """Rules ``no_half_in_place`` (``refuse_half``) and ``match_self``."""

    def wrap(fn: AnyFunction) -> AnyFunction:
        def act(device: str, args: Any, kwargs: Any) -> Any:
            target = args[0] if args else kwargs.get("input")  # as torch.exp_ calls its target
            if not isinstance(target, torch.Tensor) or target.dtype not in CASTABLE:
                return fn(*args, **kwargs)
            if refuse_half and is_half(target):
                name = fn.__name__
                raise worded(
                    NotImplementedError,
                    f"{name} got a {dtype_name(target.dtype)} target while casts are active",
                    f"It runs in float32, as {name.rstrip('_')} does, and cannot store its "
                    "result in a half tensor",
                    f"Use {name.rstrip('_')}, which returns a new float32 tensor, or call it "
                    "on tensor.float(), or inside disable_casts()",
                )
            given, kwargs = cast_arguments(args[1:], kwargs, target.dtype, device)
            return fn(*args[:1], *given, **kwargs)

        return _wrap(fn, act)

    return wrap
