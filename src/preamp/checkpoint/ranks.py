# SPDX-License-Identifier: BSD-3-Clause
"""Several processes and one checkpoint: the first rank writes, and all learn what became of it.

Every rank makes the same calls. What was to fail on one rank alone is made known to all before
anything changes, so none waits for another that has given up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from preamp.core.errors import PreampError, bad_state, worded
from preamp.core.ranks import answered, gather_objects, has_process_group, meet

T = TypeVar("T")


def rank() -> int:
    """Number of this process; 0 without others."""
    return dist.get_rank() if has_process_group() else 0


def world_size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if has_process_group() else 1


def any_rank(flag: bool) -> bool:
    """Whether ``flag`` is set on any rank; each has to ask. One all-reduce of a number."""
    if not has_process_group():
        return flag
    number = torch.tensor(int(flag), device=_device())
    cast("Any", dist).all_reduce(number, dist.ReduceOp.MAX)
    return bool(number.item())


def _device() -> torch.device:
    """That collectives run on: the accelerator, if the process group has its own back end."""
    # torch 2.6 raises where it is asked for an accelerator and there is none
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is not None:
        own = cast("Any", dist).Backend.default_device_backend_map.get(kind.type, "gloo")
        if own != "gloo" and own in str(dist.get_backend()):
            return kind
    return torch.device("cpu")


@contextmanager
def together() -> Generator[None]:
    """Run a block on every rank. If it raises on one, all raise: that error, or one naming it."""
    if not has_process_group():
        yield
        return
    own: Exception | None = None
    try:
        yield
    except Exception as error:
        own = error
    raise_together(own)


def exchanged(make: Callable[[], T]) -> list[T]:
    """Return what ``make`` returns on every rank, on every rank; errors as in `together`."""
    own: Exception | None = None
    value: Any = None
    try:
        value = make()
    except Exception as error:
        own = error
    return raise_together(own, value)


def raise_together(own: Exception | None, value: Any = None) -> list[Any]:
    """Raise on every rank if one has an error, quoting it; else return the ``value`` of each."""
    try:
        told = gathered((None if own is None else f"{type(own).__name__}: {own}", value))
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
            "A checkpoint is saved or loaded by all ranks or by none",
            "See to the cause on that rank; this one is as it was",
        )
    return [value for _, value in told]


def gathered(value: Any) -> list[Any]:
    """Return ``value`` of every rank, on every rank."""
    if not has_process_group():
        return [value]
    with _answered():
        meet(dist.group.WORLD, _device())
        return gather_objects(value)


def from_first(value: T) -> T:
    """Return the first rank's ``value``, on every rank."""
    values = [value]
    if has_process_group():
        with _answered():
            dist.broadcast_object_list(values, src=0)
    return values[0]


def gathered_on_first(value: Any) -> list[Any]:
    """Return ``value`` of every rank on the first one, and nothing on the others."""
    if not has_process_group():
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size() if rank() == 0 else None
    with _answered():
        dist.gather_object(value, values, dst=0)
    return values or []


def check_same(path: Path, identity: str) -> None:
    """Raise `PreampStateError` on all ranks unless they have read the same ``identity``."""
    told = gathered((identity, os.fspath(path)))
    for number, (other, place) in enumerate(told):
        if other != told[0][0]:
            raise bad_state(
                f"Rank {number} would load {place}, and rank 0 another checkpoint, {told[0][1]}",
                "All ranks load the same one; nothing was loaded",
                "Let one rank choose the path and broadcast it. While another is written in "
                "the background, latest_checkpoint may find it on some ranks only: wait() "
                "for it on all of them first",
            )


def _answered() -> AbstractContextManager[None]:
    return answered(
        "a checkpoint was saved or loaded",
        "All ranks save or load together, each by the same calls; files that were complete are "
        "as they were",
        "See why that rank ended or did something else, start all again, and load what "
        "preamp.checkpoint.latest_checkpoint finds",
    )
