# SPDX-License-Identifier: BSD-3-Clause
"""Choose the back end of the op table. The only place that loads one, on first use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any, Final, cast

import torch

from preamp.core.errors import unavailable
from preamp.core.extras import how_to_install
from preamp.kernels.by_device import ByDevice
from preamp.kernels.ops import Ops
from preamp.kernels.staged import Staged

_CLASSES: Final[Mapping[str, str]] = {"triton": "Triton", "jit": "Jit", "plain": "Plain"}
"""Back ends that exist: folders beside this file, and the class in each."""

REFERENCE: Final = "reference"
"""``plain`` without torch's fused kernels: the same bits on every device."""

BACKENDS = tuple(_CLASSES)

_TRITON_DEVICES = ("cuda", "xpu")


@functools.cache
def backend(name: str = "auto", place: str = "device") -> Ops:
    """Return the back end called ``name``, which is used or refused, never replaced.

    With ``place="host"`` ops on tensors of the host and a device are computed on the host.

    ``"auto"`` is the fastest one on the device of the tensors given to each op, and ``"reference"``
    is ``"plain"`` without torch's fused kernels: the same bits on every device. One that does not
    exist, or does not run here, raises ``PreampUnavailableError``.
    """
    kind = Staged if place == "host" else ByDevice
    if name == "auto":
        return kind(name, lambda device: _load(choose(device)[0]))
    if name not in (*BACKENDS, REFERENCE):
        raise unavailable(
            f"backend={name!r} is not known",
            f"Choose 'auto' or one of {', '.join(map(repr, BACKENDS))}",
            "Leave the argument out to let preamp choose",
        )
    if name == "triton" and not has_triton():
        raise unavailable(
            "backend='triton' was asked for, but the package triton is not installed",
            "It comes with torch for CUDA, ROCm and XPU",
            "Install triton, or leave the argument out to let preamp choose",
        )
    if name == "jit" and (why := lacks_numba()) is not None:
        raise unavailable(
            f"backend='jit' was asked for, but {why}",
            "Its kernels are compiled by numba, which is not there by default",
            f"{how_to_install('cpu')}, or leave the argument out to let preamp choose",
        )
    return kind(name, lambda device: _load_for(name, device))


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed; it is not imported for it."""
    return importlib.util.find_spec("triton") is not None


@functools.cache
def lacks_numba() -> str | None:
    """Why numba cannot be used, or ``None``. Imports it, since versions of numpy matter."""
    if importlib.util.find_spec("numba") is None:
        return "the package numba is not installed"
    try:
        importlib.import_module("numba")
    except Exception as error:  # whatever an extension raises
        return f"the package numba cannot be imported: {error}"
    binding: Any = importlib.import_module("llvmlite.binding")  # which numba is made of
    is_arm = binding.get_default_triple().startswith(("aarch64", "arm64"))
    try:
        converts = is_arm or binding.get_host_cpu_features().get("f16c", False)
    except RuntimeError as error:  # where LLVM does not tell
        return f"the instructions of the processor are not known: {error}"
    return None if converts else "the processor has no instructions that convert float16"


def choose(device: torch.device) -> tuple[str, str]:
    """Return the name of the back end that ``"auto"`` stands for on ``device``, and the reason."""
    if device.type == "cpu":
        why = lacks_numba()
        if why is None:
            return "jit", "one pass over all tensors of a dtype"
        return "plain", f"torch's operations on lists; for one pass: {why}"
    if device.type in _TRITON_DEVICES:
        if has_triton() and os.environ.get("TRITON_INTERPRET", "0") in {"", "0"}:
            return "triton", "one launch for all tensors of a dtype"
        return "plain", "triton is not installed or only interpreted"
    return "plain", f"torch's operations on lists run on {device.type}"


def _load_for(name: str, device: torch.device) -> Ops:
    _check_device(name, device)
    return _load(name)


def _check_device(name: str, device: torch.device) -> None:
    """Refuse a device that the back end asked for does not compute on."""
    if name == "jit" and device.type != "cpu":
        raise unavailable(
            f"backend='jit' was given a tensor on {device}",
            "Its kernels run on the CPU only",
            "Leave the argument out to let preamp choose",
        )


@functools.cache
def _load(name: str) -> Ops:
    kind = "plain" if name == REFERENCE else name
    made: Any = getattr(importlib.import_module(f"preamp.kernels.{kind}"), _CLASSES[kind])
    return cast("Ops", made(fuses=False) if name == REFERENCE else made())


def explain(name: str = "auto", device: torch.device | str = "cpu") -> str:
    """Say in one line which back end ``name`` stands for on ``device``, and why."""
    device = torch.device(device)
    if name != "auto":
        backend(name)
        _check_device(name, device)
        return f"kernels: {name} (asked for by name)"
    chosen, why = choose(device)
    return f"kernels: {chosen} ({why})"
