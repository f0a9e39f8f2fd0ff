# SPDX-License-Identifier: BSD-3-Clause
"""Start kernels: where they can run, in which dtypes, and how numbers reach them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch

from preamp.core.errors import unavailable
from preamp.kernels.plain import Plain
from preamp.kernels.triton.device.jit import INTERPRETED
from preamp.kernels.triton.tables import Table
from preamp.kernels.update import Scalar

PLAIN = Plain(fuses=False)
"""Computes what no kernel can."""

COMPILED_FOR = ("cuda", "xpu")
"""Devices that Triton compiles for; ROCm calls its own cuda."""


def check_devices(devices: Iterable[torch.device]) -> None:
    """Refuse devices that kernels cannot run on."""
    runs_on = ("cpu",) if INTERPRETED else COMPILED_FOR
    for device in devices:
        if device.type not in runs_on:
            raise unavailable(
                f"The triton back end got a tensor on {device}",
                f"Its kernels run on {' and '.join(runs_on)} here",
                "Choose the back end 'auto', or 'plain', which runs on every device",
            )


def launch(function: Any, grid: tuple[int, ...], table: Table, **arguments: Any) -> None:
    """Start ``function`` on the table's device; nothing if the grid is empty.

    Products are not fused with sums: the precision contract rounds each of them.
    """
    if 0 in grid:
        return
    device = table.layout.device
    on_device: Any = contextlib.nullcontext()
    if device.type != "cpu":
        on_device = torch.get_device_module(device).device(device)
    with on_device:
        function[grid](
            table.pointers,
            table.layout,
            table.count,
            **arguments,
            num_warps=4,
            enable_fp_fusion=False,
        )


def width_of(*written: torch.dtype | None) -> int:
    """``WIDTH`` of kernels that write lists of these dtypes; they access no more than eight."""
    return min([8, *(16 // dtype.itemsize for dtype in written if dtype is not None)])


def number(value: float) -> int:
    """The bits of ``value`` as float32, since Triton would specialise on floats."""
    return _bits_of(value, math.copysign(1.0, value))


@functools.lru_cache(maxsize=1024)
def _bits_of(value: float, sign: float) -> int:
    del sign  # which tells zeros apart
    return ctypes.c_int32.from_buffer(ctypes.c_float(value)).value


def numbers(**values: float) -> dict[str, int]:
    """Keyword arguments: the bits of each value."""
    return {name: number(value) for name, value in values.items()}


def scalar(name: str, value: Scalar | None, table: Table) -> dict[str, Any]:
    """Keyword arguments ``name``, ``name_at`` and ``NAME_AT`` of a number or 0-dim tensor."""
    at, flag = f"{name}_at", f"{name.upper()}_AT"
    if isinstance(value, torch.Tensor):
        return {name: 0, at: moved(value, table.layout.device), flag: True}
    bits = 0 if value is None else number(value)
    return {name: bits, at: table.layout, flag: False}


def given(name: str, value: torch.Tensor | None, table: Table) -> dict[str, Any]:
    """Keyword arguments ``name_at`` and ``NAME_AT`` of a 0-dim tensor that may be missing."""
    at = table.layout if value is None else moved(value, table.layout.device)
    return {f"{name}_at": at, f"{name.upper()}_AT": value is not None}


def moved(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A 0-dim tensor, on ``device``. One on the host is read here, which waits for nothing."""
    if value.device == device:
        return value
    if value.device.type == "cpu":
        return torch.full((), value.item(), dtype=value.dtype, device=device)
    return value.to(device, non_blocking=True)
