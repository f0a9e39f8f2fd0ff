# SPDX-License-Identifier: BSD-3-Clause
"""The back ends that run on every machine, as one parameter of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from preamp.kernels.blocks import Blocks, Sizes
from preamp.kernels.jit import Jit
from preamp.kernels.reference import Reference

REFERENCE: Any = Reference()
BLOCKS = Blocks()
JIT = Jit()

CUT = Blocks(Sizes(small=1008, large=3008, large_at_least=1))
"""On a CPU, with blocks small enough for the tensors of the tests to fill several."""

JOINED = Blocks(reads=False)
"""What runs on accelerators, on a CPU."""

JOINED_AND_CUT = Blocks(Sizes(joined=64), reads=False)


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


_AS_THEY_ARE = {"reference": REFERENCE, "blocks": BLOCKS, "joined": JOINED, "jit": JIT}
_EVERY = {**_AS_THEY_ARE, "cut": CUT, "joined-cut": JOINED_AND_CUT}

every_way = pytest.mark.parametrize("ops", [REFERENCE, JIT], ids=["reference", "jit"])
"""What counts values for statistics: the others take the reference."""

every_back_end = pytest.mark.parametrize("ops", _EVERY.values(), ids=_EVERY)
as_they_are = pytest.mark.parametrize("ops", _AS_THEY_ARE.values(), ids=_AS_THEY_ARE)
"""Every back end, with blocks of the size that they really have."""
