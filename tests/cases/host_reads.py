# SPDX-License-Identifier: BSD-3-Clause
"""Tensors on the CPU treated as if they lay on a device that the host would have to wait for."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from preamp.core import tensors
from preamp.engine import clipping, ledger, overflow, session
from preamp.kernels import Ops, backend
from preamp.kernels.plain import Plain
from preamp.optim.fused import base as on_device
from preamp.scaling import scaler
from preamp.watch import trace

READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)


class NoHostReads(TorchDispatchMode):
    """Raises where a tensor's value is asked for; on CUDA also where the host waits."""

    def __enter__(self) -> NoHostReads:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and not _reads_what_has_come():
            raise AssertionError(f"{func} reads a value")
        return func(*args, **(kwargs or {}))


def _reads_what_has_come() -> bool:
    """Whether the ledger looks at a flag, which it does once that lies in the host's memory."""
    own = [one.name for one in traceback.extract_stack() if one.filename == ledger.__file__]
    return own[-2:] == ["look", "read"]


class HostReads(TorchDispatchMode):
    """Counts how often the host asks for values, other than those of steps that are over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.number = 0
        inner = torch.Tensor.tolist

        def tolist(tensor: torch.Tensor) -> Any:  # of a tensor on a CPU no dispatch hears
            self._count()
            return inner(tensor)

        monkeypatch.setattr(torch.Tensor, "tolist", tolist)

    def _count(self) -> None:
        stack = traceback.extract_stack()
        self.number += not any(frame.filename == ledger.__file__ for frame in stack)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            self._count()
        return func(*args, **(kwargs or {}))


def far_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The back end for CPUs may read: it waits for nobody. So CPUs take another one here."""
    reference = Plain(fuses=False, reads=False)
    # Three objects, since the choice is remembered by call.
    for ops in (backend(), backend("auto"), backend("auto", "device")):
        chosen = ops.on

        def choose(device: torch.device, chosen: Any = chosen) -> Ops:
            return reference if device.type == "cpu" else chosen(device)

        monkeypatch.setattr(ops, "on", choose)
    for room in (tensors, clipping, on_device, trace, session, overflow, scaler, ledger):
        monkeypatch.setattr(room, "host_reaches", lambda _: False)
