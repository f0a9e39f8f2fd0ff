# SPDX-License-Identifier: BSD-3-Clause
"""Process groups: that there is one, some of its ranks, and the job of ``torchrun``."""

from __future__ import annotations

import importlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from preamp.core.errors import bad_state, bad_value
from preamp.core.ranks import gather_objects, has_process_group

collectives: Any = dist  # ``torch.distributed``; its collectives have no complete types


def require_group(what: str) -> None:
    """Raise `PreampStateError` if ``what`` was used before torch.distributed was initialized."""
    if not has_process_group():
        raise bad_state(
            f"{what} was used without a process group",
            "It needs an initialized torch.distributed, with one process at least",
            "Call torch.distributed.init_process_group first; torchrun starts the processes",
        )


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    group = collectives.group.WORLD
    return cast("dist.ProcessGroup", group)


def create_syncbn_process_group(group_size: int) -> dist.ProcessGroup | None:
    """Split the ranks into groups of ``group_size`` neighbours, for `SyncBatchNorm`.

    Ranks 0 to ``group_size - 1`` form the first group, the next ones the second, and so on. Every
    rank must make this call, since making a group is a matter of all.

    Args:
        group_size: How many ranks share their statistics; 0 for all of them.

    Returns:
        The group that this process belongs to; ``None``, which stands for all ranks, for 0.

    Raises:
        ValueError: The number of ranks is no multiple of ``group_size``.
        PreampStateError: torch.distributed is not initialized.
    """
    if group_size == 0:
        return None
    require_group("create_syncbn_process_group")
    world_size = dist.get_world_size()
    if not 0 < group_size <= world_size or world_size % group_size:
        raise bad_value(
            f"group_size={group_size!r} with {world_size} rank(s)",
            "Allowed is a divisor of the number of ranks, or 0 for one group of all",
            "Pass a size that splits the ranks into equal groups",
        )
    own = None
    for first in range(0, world_size, group_size):
        ranks = range(first, first + group_size)
        group = collectives.new_group(list(ranks))
        if dist.get_rank() in ranks:
            own = group
    return own


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
    """Be a rank of the job in the block: gloo on CPUs; ``device`` becomes current elsewhere."""
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
