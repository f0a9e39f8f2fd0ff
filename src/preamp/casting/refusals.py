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
from typing import Any, Final, cast

import torch
from torch import nn

from preamp.core.dtypes import dtype_name
from preamp.core.errors import message

_OF_HALF: Final = re.compile(
    r"\b(Complex)?Half\b|\bBFloat16\b|(Half|BFloat16)(Tensor|Type)\b|half precision|"
    r"[Ll]ow precision|float or double|mixed dtype"
)


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
    cause, level = type(error)(*error.args), "O1" if half is torch.float16 else "O4"
    error.args = (
        message(
            f"{_innermost(model, error)} cannot run: {error}",
            f"Not every function of torch takes {dtype_name(half)}, alone or beside float32",
            "Call it on tensor.float(), or name it by register_float_function"
            if casts_functions
            else "Call it on tensor.float(), name the type of a module around it in keep_fp32=, or "
            f"use opt_level={level!r}, which runs such functions in float32",
        ),
    )
    error.__cause__ = cause


def _innermost(model: nn.Module, error: BaseException) -> str:
    """Which module the error came through last: its name and its type."""
    modules: dict[int, tuple[str, nn.Module]] = {
        id(module): (name, module) for name, module in cast("Any", model).named_modules()
    }
    name, found = "", model
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name, found = modules.get(id(frame.f_locals.get("self")), (name, found))
    return f"{name or 'The model'} ({type(found).__qualname__})"
