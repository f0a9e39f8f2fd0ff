# SPDX-License-Identifier: BSD-3-Clause
"""What a process asks the others of its job when it saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from preamp.core.errors import PreampError, worded
from preamp.core.ranks import answered, gather_objects, has_process_group, meet

T = TypeVar("T")


def rank() -> int:
    """Number of this process; 0 without others."""
    return dist.get_rank() if has_process_group() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if has_process_group() else 1


def _device() -> torch.device:
    """That collectives run on: the accelerator, if the process group has its own back end."""
    # torch 2.6 raises where it is asked for an accelerator and there is none
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        own = cast("Any", dist).Backend.default_device_backend_map.get(kind.type, "gloo")
        if own != "gloo" and own in str(dist.get_backend()):
            return kind
    return torch.device("cpu")


def exchanged(make: Callable[[], T]) -> list[T]:
    """Return what ``make`` returns on every rank, on every rank.

    If it raises on one, all raise: that error, or one naming it.
    """
    own: Exception | None = None
    value: Any = None
    try:
        value = make()
    except Exception as error:
        own = error
    try:
        told = _gathered((None if own is None else f"{type(own).__name__}: {own}", value))
    except PreampError:
        if own is None:
            raise
        told = []
    if own is not None:
        raise own
    failed = [(number, text) for number, (text, _) in enumerate(told) if text is not None]
    if failed:
        number, text = failed[0]
        raise worded(
            PreampError,
            f"Rank {number} of {len(told)} failed with {text}",
            "A checkpoint is saved by all ranks or by none",
            "See to the cause on that rank; this one is as it was",
        )
    return [value for _, value in told]


def _gathered(value: Any) -> list[Any]:
    if not has_process_group():
        return [value]
    with _answered():
        meet(dist.group.WORLD, _device())
        return gather_objects(value)


def _answered() -> AbstractContextManager[None]:
    return answered(
        "a checkpoint was saved",
        "All ranks save together, each by the same calls",
        "See why that rank ended or did something else, start all again, and load the newest "
        "complete checkpoint",
    )
