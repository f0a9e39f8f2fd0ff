# SPDX-License-Identifier: BSD-3-Clause
"""A model that runs a callback inside its forward."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

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
