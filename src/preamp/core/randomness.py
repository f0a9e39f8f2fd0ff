# SPDX-License-Identifier: BSD-3-Clause
"""Random numbers that a program does not notice were drawn."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch


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
