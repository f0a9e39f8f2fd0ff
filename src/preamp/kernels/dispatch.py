# SPDX-License-Identifier: BSD-3-Clause
"""Choose the back end of the op table. The only place that loads one, on first use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import cast

import torch

from preamp.core.errors import PreampUnavailableError, message
from preamp.kernels.by_device import ByDevice
from preamp.kernels.ops import Ops

BACKENDS = ("triton", "cpu", "foreach", "reference")
"""Back ends that exist."""

_TRITON_DEVICES = ("cuda", "xpu")


@functools.cache
def backend(name: str = "auto") -> Ops:
    """Return the back end called ``name``.

    Args:
        name: ``"auto"`` for the fastest one on the device of the tensors given to each op, or one
            of `BACKENDS`, which then is used or refused, never replaced.

    Raises:
        PreampUnavailableError: There is no such back end, or it does not run here.
    """
    if name == "auto":
        return cast("Ops", ByDevice(name, lambda device: _load(choose(device)[0])))
    if name not in BACKENDS:
        raise PreampUnavailableError(
            message(
                f"backend={name!r} is not known",
                f"Choose 'auto' or one of {', '.join(map(repr, BACKENDS))}",
                "Leave the argument out to let preamp choose",
            )
        )
    if name == "triton" and not has_triton():
        raise PreampUnavailableError(
            message(
                "backend='triton' was asked for, but the package triton is not installed",
                "It comes with torch for CUDA, ROCm and XPU",
                "Install triton, or leave the argument out to let preamp choose",
            )
        )
    return cast("Ops", ByDevice(name, lambda device: _load_for(name, device)))


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; it is not imported for it."""
    return importlib.util.find_spec("triton") is not None


def choose(device: torch.device) -> tuple[str, str]:
    """Return the name of the back end that ``"auto"`` stands for on ``device``, and the reason."""
    if device.type == "cpu":
        return "cpu", "blocks that stay in the cache"
    if device.type in _TRITON_DEVICES:
        if has_triton() and os.environ.get("TRITON_INTERPRET", "0") in {"", "0"}:
            return "triton", "one launch for all tensors of a dtype"
        return "foreach", "triton is not installed or only interpreted"
    if device.type == "meta":
        return "reference", "meta tensors have no values"
    return "foreach", f"torch's multi-tensor operations run on {device.type}"


def _load_for(name: str, device: torch.device) -> Ops:
    if name == "cpu" and device.type != "cpu":
        raise PreampUnavailableError(
            message(
                f"backend='cpu' was given a tensor on {device}",
                "It computes on the CPU only",
                "Leave the argument out to let preamp choose, or take 'foreach' or 'reference'",
            )
        )
    return _load(name)


@functools.cache
def _load(name: str) -> Ops:
    return cast("Ops", importlib.import_module(f"preamp.kernels.{name}"))


def explain(name: str = "auto", device: torch.device | str = "cpu") -> str:
    """Say in one line which back end ``name`` stands for on ``device``, and why.

    Raises:
        PreampUnavailableError: There is no such back end, or it does not run here.
    """
    if name != "auto":
        return f"kernels: {backend(name).name} (asked for by name)"
    chosen, why = choose(torch.device(device))
    return f"kernels: {chosen} ({why})"
