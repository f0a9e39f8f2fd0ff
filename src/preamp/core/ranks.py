# SPDX-License-Identifier: BSD-3-Clause
"""What a process has to know about there being others, and the little it may tell them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from preamp.core.errors import PreampError, worded

_collectives: Any = dist  # no complete types


has_process_group: Callable[[], bool] = dist.is_initialized if dist.is_available() else bool
"""Whether ``torch.distributed`` is initialized, and gradients may thus be reduced by hooks."""


def has_other_ranks() -> bool:
    """Whether this process is one of several."""
    return has_process_group() and dist.get_world_size() > 1


def is_first_rank() -> bool:
    """Whether this process speaks for the job: rank 0, or the only process there is."""
    return not has_process_group() or dist.get_rank() == 0


def name_of_rank() -> str:
    """What to call this process among the others; needs a process group."""
    return f"Rank {dist.get_rank()}"


def meet(group: Any, device: torch.device | str) -> None:
    """Wait until all ranks of ``group`` call this; by a reduction to one rank, which no step has.

    A rank that saves, loads or compares alone therefore waits for the timeout, and raises. An
    all-gather would meet the one by which the others gather weights under ``fully_shard``: gloo
    ends a process that is sent more than it expects, and other back ends do not look.
    """
    _collectives.reduce(
        torch.zeros(1, device=device), _collectives.get_global_rank(group, 0), group=group
    )


@contextmanager
def answered(during: str, allowed: str, do: str) -> Generator[None]:
    """Turn torch's error, of a closed connection or the group's timeout, into a `PreampError`."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        got = f"Another rank did not answer while {during}: {reason[0]}"
        raise worded(PreampError, got, allowed, do) from error


def gather_tensors(tensor: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return every rank's ``tensor``, alike in shape and dtype; all of ``group`` call this."""
    found = [torch.empty_like(tensor) for _ in range(group.size())]
    meet(group, tensor.device)
    _collectives.all_gather(found, tensor, group=group)
    return found


def gather_objects(item: Any, group: Any = None) -> list[Any]:
    """Return ``item`` of every rank, in their order. All ranks of ``group`` must call this.

    ``None`` are all ranks there are; of a process that is the only one ``[item]`` comes back.
    """
    if group is None and not has_process_group():
        return [item]
    group = dist.group.WORLD if group is None else group
    found: list[Any] = [None] * group.size()
    _collectives.all_gather_object(found, item, group=group)
    return found


def broadcast_from_first(tensor: torch.Tensor, group: Any) -> None:
    """Give ``tensor`` the value that it has on the first rank of ``group``; in place."""
    first = _collectives.get_global_rank(group, 0)
    _collectives.broadcast(tensor, first, group=group)
