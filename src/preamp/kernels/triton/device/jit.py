# SPDX-License-Identifier: BSD-3-Clause
# pyright: reportMissingTypeStubs=false
"""How kernels are made, and torch's dtypes in their words."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
import triton
import triton.language as tl

KINDS: dict[torch.dtype | None, Any] = {
    None: None,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.int8: tl.int8,
    torch.uint8: tl.uint8,
    torch.int16: tl.int16,
}
"""torch's dtypes in Triton's words."""


def kernel(function: Callable[..., None]) -> Any:
    """Compile for arguments in capitals only, not anew for values or alignment of others."""
    names = inspect.signature(function).parameters
    function.__annotations__ |= dict.fromkeys(filter(str.isupper, names), "tl.constexpr")
    varying = [name for name in names if not name.isupper()]
    return cast("Any", triton).jit(function, do_not_specialize=varying)


helper: Any = cast("Any", triton).jit
"""Compile what kernels call; type checkers cannot tell what such functions take."""


@kernel
def _probe() -> None: ...


INTERPRETED = not isinstance(_probe, triton.JITFunction)
"""Whether ``TRITON_INTERPRET=1`` was set when this was loaded: then kernels run on CPUs only."""
