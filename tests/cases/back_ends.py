# SPDX-License-Identifier: BSD-3-Clause
"""The back ends that run on every machine, as one parameter of a test."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from preamp.kernels import OP_NAMES
from preamp.kernels.foreach import sizes

NAMES = ("reference", "cpu", "foreach")


class Cut:
    """The foreach back end with blocks of a few elements, so that small tensors fill several."""

    name = "foreach"

    def __init__(self) -> None:
        self._ops = importlib.import_module("preamp.kernels.foreach")

    def __getattr__(self, op: str) -> Any:
        if op not in OP_NAMES:
            raise AttributeError(op)

        def call(*args: Any, **kwargs: Any) -> Any:
            with mock.patch.object(sizes, "BLOCK", 64):
                return getattr(self._ops, op)(*args, **kwargs)

        return call


REFERENCE: Any = importlib.import_module("preamp.kernels.reference")


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str) -> Iterator[None]:
    """Tensors of a block have this dtype and device unless told otherwise."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


_MODULES = [importlib.import_module(f"preamp.kernels.{name}") for name in NAMES]

every_back_end = pytest.mark.parametrize("ops", [*_MODULES, Cut()], ids=[*NAMES, "foreach-cut"])
as_they_are = pytest.mark.parametrize("ops", _MODULES, ids=NAMES)
"""Every back end, with blocks of the size that they really have."""
