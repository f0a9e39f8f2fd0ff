# SPDX-License-Identifier: BSD-3-Clause
"""Process groups: that there is one, and some of its ranks."""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist

from preamp.core.errors import bad_state, bad_value
from preamp.core.ranks import has_process_group

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
