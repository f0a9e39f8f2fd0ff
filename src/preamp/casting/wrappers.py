# SPDX-License-Identifier: BSD-3-Clause
"""The callables that replace a function, one maker for each rule of the op table.

All of them look at torch's autocast state when called and pass the call through where casts are not
active. They are plain Python without thread-local look-ups, so ``torch.compile`` traces them.
float64 is left alone everywhere, as autocast does: casts never reduce what the user widened. So is
the other half dtype than the one that casts are on for: such tensors belong to another engine, or
to nobody who asked for casts, and torch's own autocast would cast some and refuse others. Under
Apex's names float functions take it too, as they did there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import torch

from preamp.casting.autocast_state import casting_device, untraced
from preamp.casting.patches import Wrapper
from preamp.casting.thread_casts import STALE, settle_thread, widens_any_half
from preamp.core.dtypes import HALF_DTYPES, dtype_name, is_half
from preamp.core.errors import worded
from preamp.core.pytree import map_tensors
from preamp.kernels.wide_half import leaves

AnyFunction = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

CASTABLE: Final = (*HALF_DTYPES, torch.float32)


def cast_arguments(
    args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype, device_type: str
) -> Arguments:
    """The arguments with half and float32 tensors on ``device_type`` cast to ``dtype``."""

    def cast_one(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype in CASTABLE and tensor.device.type == device_type:
            return tensor.to(dtype)
        return tensor

    return (
        tuple(map_tensors(cast_one, arg) for arg in args),
        {name: map_tensors(cast_one, arg) for name, arg in kwargs.items()},
    )


def device_to_cast_on(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """`casting_device`, once casts that should have ended on this thread have done so."""
    device = casting_device(args, kwargs)
    if device is not None and STALE:
        settle_thread()
        device = casting_device(args, kwargs)
    return device


def _run(fn: AnyFunction, arguments: Arguments, closed_on: str | None) -> Any:
    """Call ``fn``, with autocast off on the device type ``closed_on`` if there is one."""
    args, kwargs = arguments
    if closed_on is None:
        return fn(*args, **kwargs)
    with torch.autocast(closed_on, enabled=False):
        return fn(*args, **kwargs)


def _half_of_others(device_type: str) -> torch.dtype:
    """The half dtype that casts on ``device_type`` are not on for."""
    is_float16 = torch.get_autocast_dtype(device_type) is torch.float16
    return torch.bfloat16 if is_float16 else torch.float16


def is_of_others(values: Sequence[Any], device_type: str) -> bool:
    """Whether what could be cast on ``device_type`` is all of the other half dtype."""
    tensors = [t for t in leaves(values) if t.device.type == device_type]
    return {t.dtype for t in tensors if t.dtype in CASTABLE} == {_half_of_others(device_type)}


WIDENING: Final[list[object]] = []
"""One entry for each installation of casts that may widen both half dtypes; ``torch.compile``,
which cannot look at a thread's own state, asks whether it is empty."""

_widens_untraced = untraced(widens_any_half)


def widens_others() -> bool:
    """Whether float functions take the other half dtype too, where this is called."""
    if not WIDENING:
        return False
    return _widens_untraced() if torch.compiler.is_compiling() else widens_any_half()


def _has_others(values: Iterable[Any], device_type: str) -> bool:
    """Whether one of ``values`` is a tensor of the other half dtype on ``device_type``."""
    other = _half_of_others(device_type)
    return any([isinstance(value, torch.Tensor) and value.dtype is other for value in values])


def wrap_half(
    *,
    native: frozenset[str] = frozenset(),
    is_closed: bool = False,
    is_open: bool = False,
    dtype: torch.dtype | None = None,
) -> Wrapper:
    """Rule ``half``: leave ``native`` devices to autocast; ``dtype`` defaults to the active one.

    What gets the other half dtype only runs without casts, unless the body ``is_open``: a Python
    function of the user's, in which each call goes by its own rule.
    """

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def half(*args: Any, **kwargs: Any) -> Any:
            device = device_to_cast_on(args, kwargs)
            if device is None:
                return fn(*args, **kwargs)
            if is_of_others((*args, *kwargs.values()), device):
                return _run(fn, (args, kwargs), None if is_open else device)
            if device in native:
                return fn(*args, **kwargs)
            target = torch.get_autocast_dtype(device) if dtype is None else dtype
            arguments = cast_arguments(args, kwargs, target, device)
            return _run(fn, arguments, device if is_closed else None)

        return half

    return wrap


def wrap_float(*, is_closed: bool = False, is_open: bool = False) -> Wrapper:
    """Rule ``float``; ``is_open`` as for `wrap_half`."""

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def float32(*args: Any, **kwargs: Any) -> Any:
            device = device_to_cast_on(args, kwargs)
            if device is None:
                return fn(*args, **kwargs)
            if is_of_others((*args, *kwargs.values()), device) and not widens_others():
                return _run(fn, (args, kwargs), None if is_open else device)
            arguments = cast_arguments(args, kwargs, torch.float32, device)
            return _run(fn, arguments, device if is_closed else None)

        return float32

    return wrap


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


def wrap_promote(*, is_closed: bool = False) -> Wrapper:
    """Rule ``promote``; what torch promotes by itself (float64, two half dtypes) is its own."""

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def promote(*args: Any, **kwargs: Any) -> Any:
            # Looking at the dtypes first is cheaper than asking for the autocast state, and
            # nearly every sum and product in a program ends here.
            if not (is_mixed(args) or (kwargs and is_mixed((*args, *kwargs.values())))):
                if not is_closed:
                    return fn(*args, **kwargs)
            device = device_to_cast_on(args, kwargs)
            if device is None:
                return fn(*args, **kwargs)
            values = (*args, *kwargs.values())
            arguments: Arguments = (args, kwargs)
            # Where torch promotes by itself, it does so for the other half dtype.
            if is_mixed(values) and (is_closed or not _has_others(values, device)):
                arguments = cast_arguments(args, kwargs, torch.float32, device)
            return _run(fn, arguments, device if is_closed else None)

        return promote

    return wrap


def wrap_sequence_promote() -> Wrapper:
    """Rule ``sequence_promote``."""

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def sequence_promote(*args: Any, **kwargs: Any) -> Any:
            items = args[0] if args else kwargs.get("tensors")
            device = device_to_cast_on(args, kwargs)
            if device is None or not isinstance(items, (list, tuple)):
                return fn(*args, **kwargs)
            values = cast("list[Any]", items)
            if not is_mixed(values):
                # Without casts, under which the CPU's autocast refuses to join them.
                return _run(fn, (args, kwargs), device if _has_others(values, device) else None)
            args, kwargs = cast_arguments(args, kwargs, torch.float32, device)
            return fn(*args, **kwargs)

        return sequence_promote

    return wrap


def wrap_banned(fn: AnyFunction) -> AnyFunction:
    """Rule ``banned``; float32 arguments are fine, also where autocast itself would refuse."""

    @functools.wraps(fn)
    def banned(*args: Any, **kwargs: Any) -> Any:
        device = device_to_cast_on(args, kwargs)
        if device is None:
            return fn(*args, **kwargs)
        values = (*args, *kwargs.values())
        halves = [a for a in values if isinstance(a, torch.Tensor) and is_half(a)]
        if halves and not is_of_others(values, device):
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
        return _run(fn, (args, kwargs), device)

    return banned


def _cast_rest(args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Arguments:
    rest, kwargs = cast_arguments(args[1:], kwargs, dtype, args[0].device.type)
    return (args[0], *rest), dict(kwargs)


def wrap_in_place(*, refuse_half: bool) -> Wrapper:
    """Rules ``no_half_in_place`` (``refuse_half``) and ``match_self``."""

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def in_place(*args: Any, **kwargs: Any) -> Any:
            if not args and "input" in kwargs:  # as torch.exp_ calls its target
                args = (kwargs.pop("input"),)
            target = args[0] if args else None
            if not isinstance(target, torch.Tensor) or not device_to_cast_on([target], {}):
                return fn(*args, **kwargs)
            if refuse_half and target.dtype is _half_of_others(target.device.type):
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
            if target.dtype not in CASTABLE:
                return fn(*args, **kwargs)
            args, kwargs = _cast_rest(args, kwargs, target.dtype)
            return fn(*args, **kwargs)

        return in_place

    return wrap
