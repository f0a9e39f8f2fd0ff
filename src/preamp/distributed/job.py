# SPDX-License-Identifier: BSD-3-Clause
"""Take part in a job that ``torchrun`` has started, or be alone."""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from preamp.core.ranks import gather_objects, has_process_group
from preamp.distributed.groups import collectives, default_group

_TIMEOUT = timedelta(minutes=10)
"""Until ranks give up on one that died without closing its connections."""


def launched_ranks() -> int:
    """How many processes the launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    """This process's number among them."""
    return int(os.environ.get("RANK", "0"))


def own_device(device: torch.device) -> torch.device:
    """The accelerator of this rank, where ``device`` names a kind and not one of them."""
    if device.type == "cpu" or ":" in str(device) or launched_ranks() == 1:
        return device
    return torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def joined(device: torch.device) -> Generator[None]:
    """Be a rank of the launched job inside the block; gloo on CPUs, elsewhere what torch takes.

    ``device`` becomes the current one of its kind.
    """
    if launched_ranks() == 1:
        yield
        return
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index or 0)
    back_end = "gloo" if device.type == "cpu" else None
    collectives.init_process_group(back_end, timeout=_TIMEOUT)
    try:
        yield
    finally:
        collectives.destroy_process_group()


def gather_to_all(item: Any) -> list[Any]:
    """Return ``item`` of every rank, in their order; all of them call this."""
    return gather_objects(item, default_group()) if has_process_group() else [item]


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """Return the mean of a scalar over all ranks, the same on each; all of them call this."""
    if not has_process_group():
        return value.detach()
    total = value.detach().clone()
    collectives.all_reduce(total)
    return total / default_group().size()


def shard_fully(model: nn.Module, blocks: nn.ModuleList) -> None:
    """Let ranks share weights, gradients and optimizer state: ``fully_shard``, block by block.

    The parameters are replaced, so build the optimizer afterwards. ``blocks`` are gathered one at a
    time.
    """
    # By name and late: it takes torch's compiler along.
    fully_shard = importlib.import_module("torch.distributed.fsdp").fully_shard
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
