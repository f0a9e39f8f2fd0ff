# SPDX-License-Identifier: BSD-3-Clause
"""Waits of the host for a device, which CUDA can be told to refuse."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def waits_refused() -> Iterator[None]:
    """Let CUDA raise wherever the host would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
