# SPDX-License-Identifier: BSD-3-Clause
"""Trying things out without a trace: copies, and random numbers put back."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn

from preamp.core.errors import bad_value

SomeOptimizer = TypeVar("SomeOptimizer", bound="torch.optim.Optimizer | None")


@contextmanager
def untouched_random() -> Generator[None]:
    """Put the states of torch's, Python's and numpy's random numbers back at the end."""
    kind, devices = _accelerators()
    python = random.getstate()
    numpy: Any = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    try:
        with cast("Any", torch.random).fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(state)


def _accelerators() -> tuple[str, list[int]]:
    """The kind and numbers of the accelerators; none on a machine that has none."""
    if not torch.accelerator.is_available():  # torch 2.6 raises where it is asked for one then
        return "cuda", []
    kind = torch.accelerator.current_accelerator()
    return "cuda" if kind is None else kind.type, list(range(torch.accelerator.device_count()))


def copy_of(model: nn.Module, optimizer: SomeOptimizer) -> tuple[nn.Module, SomeOptimizer]:
    """Copy a model together with its optimizer, which then updates the copy."""
    try:
        twin, other = copy.deepcopy((model, optimizer))
    except Exception as error:
        raise bad_value(
            f"The model or its optimizer cannot be copied: {error}",
            "Everything is tried out on copies made by copy.deepcopy",
            "Move what cannot be copied (open files, locks, graphs) out of the model",
        ) from error
    for param in twin.parameters():
        param.grad = None
    return twin, other
