# SPDX-License-Identifier: BSD-3-Clause
"""Print what is cast: the layer that ``verbosity=2`` puts on top of all others."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, cast

import torch

from preamp.casting.autocast_state import casting_device
from preamp.casting.patches import Wrapper
from preamp.casting.wrappers import CASTABLE, AnyFunction, is_mixed
from preamp.core.log import say

CastRule = Literal["half", "float", "promote", "sequence_promote"]

_NAMES: Final = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}


def wrap_report(rule: CastRule, dtype: torch.dtype | None = None) -> Wrapper:
    """Print a line for each tensor that the function below will cast; casts nothing itself.

    The lines are Apex's: ``Float->Half (linear)``, ``BFloat16->Float (softmax)``. A weight is
    named in each call, also where autocast's cache holds its cast already. Compiled code prints
    nothing: what it casts was decided when it was compiled.

    Args:
        rule: The rule of the function, from the op table or a registration.
        dtype: What a ``half`` rule casts to; ``None`` means the dtype active where it is called.
    """

    def wrap(fn: AnyFunction) -> AnyFunction:
        @functools.wraps(fn)
        def reported(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                for line in _lines(rule, dtype, args, kwargs):
                    say(f"{line} ({fn.__name__})")
            return fn(*args, **kwargs)

        return reported

    return wrap


def _lines(
    rule: CastRule, dtype: torch.dtype | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[str]:
    device = casting_device(args, kwargs)
    if device is None:
        return
    if rule == "half":
        target = dtype or torch.get_autocast_dtype(device)
    else:
        target = torch.float32
    values: Sequence[Any] = (*args, *kwargs.values())
    if rule == "sequence_promote":
        values = args[0] if args else kwargs.get("tensors", ())
    if rule in ("promote", "sequence_promote") and not is_mixed(values):
        return
    for tensor in _floating(values):
        if tensor.dtype in CASTABLE and tensor.dtype is not target and tensor.device.type == device:
            yield f"{_NAMES[tensor.dtype]}->{_NAMES[target]}"


def _floating(values: Sequence[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _floating(cast("Sequence[Any]", value))
