# SPDX-License-Identifier: BSD-3-Clause
"""Constants that a half format cannot hold: they become its largest finite value.

Models write ``masked_fill(mask, -1e9)`` and ``torch.finfo(torch.float32).min`` for "as low as it
gets". torch raises where such a number meets a half tensor, in these functions. Infinities and
what the format can hold, if rounded, stay as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, Final

import torch

from preamp.casting.autocast_state import is_casting
from preamp.casting.patches import Wrapper
from preamp.casting.reports import Cast, tell
from preamp.casting.thread_casts import STALE, settle_thread
from preamp.casting.wrappers import AnyFunction
from preamp.core.dtypes import HALF_DTYPES
from preamp.kernels.wide_half import leaves

_BOUNDS: Final = "clamp clamp_min clamp_max clip clamp_ clamp_min_ clamp_max_ clip_"
_FILLS: Final = "masked_fill index_fill scatter fill_"
_METHODS: Final = "masked_fill_ index_fill_ scatter_ fill_diagonal_ new_full"
_OTHERS: Final = "fill full full_like constant_pad_nd threshold"
CONSTANTS: Final = (
    *(("torch", name) for name in f"{_BOUNDS} {_FILLS} {_OTHERS}".split()),
    *(("torch.Tensor", name) for name in f"{_BOUNDS} {_FILLS} {_METHODS}".split()),
    *(("torch.nn.functional", name) for name in "pad hardtanh threshold".split()),
)
"""``(namespace, name)`` of the functions, as in the op table."""

_MODEST: Final = torch.finfo(torch.float16).max


def _are_modest(values: Iterable[Any]) -> bool:
    """Whether no number among ``values`` is beyond either half format, as nearly always."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.ndim == 0:
                return False
        elif isinstance(value, (float, int)):
            if not -_MODEST <= value <= _MODEST:
                return False
        elif isinstance(value, Real):  # numpy's
            return False
    return True


def _dtype_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of what is written to, or made."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"]
    target = args[0] if args else kwargs.get("input")
    return target.dtype if isinstance(target, torch.Tensor) else None


def _device_type_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"]).type
    tensors = leaves((*args, *kwargs.values()))
    return (tensors[0].device if tensors else torch.get_default_device()).type


def _casts_to(dtype: torch.dtype, device_type: str) -> bool:
    if STALE and is_casting(device_type):
        settle_thread()
    return is_casting(device_type) and torch.get_autocast_dtype(device_type) is dtype


def _number(value: Any) -> float | None:
    """``value`` if it is a number, or a tensor of one that can be looked at without waiting."""
    if isinstance(value, torch.Tensor):
        is_near = value.ndim == 0 and value.device.type == "cpu" and not value.requires_grad
        if not is_near or not value.is_floating_point() or torch.compiler.is_compiling():
            return None
        return value.item()
    return float(value) if isinstance(value, Real) else None


def wrap_constant(*, everywhere: bool) -> Wrapper:
    """Let a function take constants beyond half: ``everywhere``, or where casts are active."""

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def within(*args: Any, **kwargs: Any) -> Any:
            if _are_modest(args) and (not kwargs or _are_modest(kwargs.values())):
                return fn(*args, **kwargs)
            dtype = _dtype_of(args, kwargs)
            if dtype not in HALF_DTYPES:
                return fn(*args, **kwargs)
            if not everywhere and not _casts_to(dtype, _device_type_of(args, kwargs)):
                return fn(*args, **kwargs)
            largest = torch.finfo(dtype).max

            def clamp(value: Any) -> Any:
                number = _number(value)
                if number is None or not largest < abs(number) < math.inf:
                    return value
                clamped = math.copysign(largest, number)
                if not torch.compiler.is_compiling():
                    note = f"{number:g} became {clamped:g}"
                    tell(Cast(fn.__name__, torch.float32, dtype, 0, note))
                return clamped

            return fn(
                *[clamp(value) for value in args],
                **{name: clamp(value) for name, value in kwargs.items()},
            )

        return within

    return wrap
