# SPDX-License-Identifier: BSD-3-Clause
"""A model that runs a callback inside its forward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from preamp.casting.functions import FUNCTION_CASTS, WIDE_HALF, install_function_casts
from preamp.casting.thread_casts import push_thread_casts
from preamp.core.undo import Removable, UndoStack

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
CPU = frozenset({"cpu"})


class Probe(nn.Module):
    """Calls what it is given inside its forward, and returns a linear layer's output."""

    def __init__(self, inside: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inside()
        return self.linear(x)


def product() -> torch.dtype:
    """The dtype of a matrix product of float32 tensors: half where casts are active."""
    return torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype


def held(change: Callable[..., None], *args: Any, **options: Any) -> Removable:
    """Make a change that takes an ``undo``, and return what ends it."""
    undo = UndoStack()
    try:
        change(*args, **options, undo=undo)
    except BaseException:
        undo.unwind()
        raise
    return SimpleNamespace(remove=undo.unwind)


def install_wide_half(half: torch.dtype, undo: UndoStack) -> None:
    """Products of ``half`` run wide on the CPU, whether it has units for them or not."""
    WIDE_HALF[half].acquire(undo)


@contextmanager
def casting(dtype: torch.dtype = F16) -> Iterator[None]:
    """Functions are cast on this thread."""
    undo = UndoStack()
    try:
        install_function_casts(undo)
        push_thread_casts(CPU, dtype, undo)
        yield
    finally:
        undo.unwind()


@contextmanager
def registrations_forgotten() -> Iterator[None]:
    """What is registered inside is forgotten."""
    before = set(FUNCTION_CASTS.extras)
    yield
    for key in FUNCTION_CASTS.extras.keys() - before:
        del FUNCTION_CASTS.extras[key]
