# SPDX-License-Identifier: BSD-3-Clause
"""Where torch refuses half tensors inside a forward: say which module it was, and the ways out.

torch runs the hook that ends a forward also when the forward raised, while the error is on its way.
It goes on as the same object, so it stays of torch's class: only its words change, and an error in
torch's words becomes its cause. A forward that does not raise never comes here.
"""

from __future__ import annotations

import inspect
import re
import sys
import traceback
from collections.abc import Iterable
from typing import Any, Final, cast

import torch
from torch import nn

from preamp.core.dtypes import dtype_name
from preamp.core.errors import message
from preamp.core.program import call_of_error, line_of_error, shown

_OF_HALF: Final = re.compile(
    r"\b(Complex)?Half\b|\bBFloat16\b|(Half|BFloat16)(Tensor|Type)\b|half precision|"
    r"[Ll]ow precision|float or double|mixed dtype"
)
_PUBLIC: Final = re.compile(r"((?:torch|F)(?:\.\w+)*)\.(\w+)")


def explain_refusal(model: nn.Module, half: torch.dtype, *, casts_functions: bool) -> None:
    """Reword the error that ``model``'s forward is raising if it is torch's about half tensors.

    To be called by a forward hook of ``model``, whose caller handles the error.
    """
    error = sys.exc_info()[1]
    if error is None or type(error) not in (RuntimeError, NotImplementedError, TypeError):
        return
    if error.__cause__ is not None or not _OF_HALF.search(str(error)):
        return
    caller, _ = next(traceback.walk_tb(error.__traceback__))
    if caller is not inspect.stack(0)[2].frame:  # an older error, which the program is handling
        return
    call = call_of_error(error)
    found = _module(model, error)
    place = f"{call or 'a function'} at {shown(line_of_error(error))}"
    cause = type(error)(*error.args)
    error.args = (
        message(
            f"{place}, in {_named(found, model)}, cannot run: {error}",
            f"Not every function of torch takes {dtype_name(half)}, alone or beside float32",
            _ways_out(call, None if found is model else found, half, casts_functions),
        ),
    )
    error.__cause__ = cause


def _module(model: nn.Module, error: BaseException) -> nn.Module:
    """The innermost module that the error came through."""
    modules = {id(module): module for module in model.modules()}
    found = model
    for frame, _ in traceback.walk_tb(error.__traceback__):
        found = modules.get(id(frame.f_locals.get("self")), found)
    return found


def _named(found: nn.Module, model: nn.Module) -> str:
    modules: Iterable[tuple[str, nn.Module]] = cast("Any", model).named_modules()
    name = next(name for name, module in modules if module is found)
    return f"{name or 'the model'} ({type(found).__qualname__})"


def _ways_out(call: str, part: nn.Module | None, half: torch.dtype, casts_functions: bool) -> str:
    public = _PUBLIC.fullmatch(call)
    name = f"({public[1]}, {public[2]!r})" if public else ""
    if casts_functions:
        return (
            f"Call register_float_function{name}, so that it runs in float32, or call it on "
            "tensor.float()"
        )
    if part is None:
        keep = "Move the call to a module of its own and name its type in keep_fp32="
    else:
        keep = f"Pass keep_fp32={type(part).__name__} to initialize"
    level = "O1" if half is torch.float16 else "O4"
    return (
        f"{keep}, call the function on tensor.float(), or use opt_level={level!r}, "
        f"which runs such functions in float32, and others by register_float_function{name}"
    )
