# SPDX-License-Identifier: BSD-3-Clause
"""Several processes and one checkpoint: the first rank writes, and all learn what became of it.

Every rank makes the same calls. What was to fail on one rank alone is made known to all before
anything changes, so none waits for another that has given up.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist

from preamp.core.errors import PreampError, bad_state, worded
from preamp.core.ranks import answered, has_process_group, meet

if TYPE_CHECKING:
    from preamp.checkpoint.shards import Shard

T = TypeVar("T")

_WORDS = 1 << 17
"""Of eight bytes, that are multiplied at a time: they stay in the processor's cache."""
_ODD = -7046029254386353131  # 2⁶⁴ divided by the golden ratio, as a signed number
_SHARED = ("models/", "optimizers/", "own_params/")
_SHOWN = 3


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
    values: list[Any] = [None] * dist.get_world_size()
    with _answered():
        meet(dist.group.WORLD, _device())
        cast("Any", dist).all_gather_object(values, value)
    return values


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


Print = tuple[Any, ...]  # what differs where two tensors differ


def fingerprints(tensors: Mapping[str, torch.Tensor | Shard]) -> dict[str, Print]:
    """Return for each tensor what differs where two of them differ, computed on its device.

    Of a piece that no other rank has the values are not looked at. Waits once for each device.
    """
    read = {
        name: kept if isinstance(kept, torch.Tensor) else kept.data
        for name, kept in tensors.items()
        if isinstance(kept, torch.Tensor) or not kept.is_alone
    }
    sums: dict[str, int] = {}
    for device in {tensor.device for tensor in read.values()}:
        names = [name for name, tensor in read.items() if tensor.device == device]
        factors = _factors(device)
        found = torch.stack([_fingerprint(read[name], factors) for name in names])
        sums.update(zip(names, cast("Any", found).tolist(), strict=True))
    return {
        name: (str(kept.dtype), tuple(kept.shape), sums[name])
        if isinstance(kept, torch.Tensor)
        else (kept.box, kept.frame, str(kept.data.dtype), sums.get(name))
        for name, kept in tensors.items()
    }


def _factors(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, so that no word is lost and none can take another's place."""
    mixed = torch.arange(1, _WORDS + 1, device=device) * _ODD
    return ((mixed ^ (mixed >> 29)) * _ODD) | 1


def _fingerprint(tensor: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """A sum modulo 2⁶⁴: reading the tensor once takes a tenth of the time of copying it."""
    raw = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    end = raw.numel() // 8 * 8
    words: Any = raw[:end].view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for chunk in cast("Iterable[torch.Tensor]", (*words.split(_WORDS), raw[end:].long())):
        own = factors[: chunk.numel()]
        is_near = raw.device.type == "cpu"  # elsewhere torch has no product of integers
        total = total * _ODD + (torch.dot(chunk, own) if is_near else (chunk * own).sum())
    return total


def is_shared(name: str) -> bool:
    """Whether a tensor of this name is the same on all ranks, if it is no buffer and whole."""
    return name.startswith(_SHARED)


def differing(prints: Mapping[str, Print], first: Mapping[str, Print]) -> list[str]:
    """Names of the tensors that the first rank does not have, or has others for."""
    return [name for name, known in prints.items() if first.get(name) != known]


def check_shared(
    differences: list[list[str]], buffers: frozenset[str], pieces: frozenset[str]
) -> None:
    """Raise `PreampStateError` if ranks disagree about what they train together.

    For each rank, ``differences`` has in what it differs from the first one. ``buffers`` of models
    may differ; copies of ``pieces`` of sharded tensors may not.
    """
    for number, names in enumerate(differences):
        shared = [
            name for name in names if name in pieces or (is_shared(name) and name not in buffers)
        ]
        if shared:
            raise bad_state(
                f"Rank {number} has other values than rank 0 in {len(shared)} of the weights "
                f"and optimizer states, such as {', '.join(shared[:_SHOWN])}",
                "Ranks that save one checkpoint have the same weights and optimizer states; "
                "gradients, buffers and random states may differ",
                "Broadcast them from one rank if they should be the same. Parts of one model "
                "in plain tensors are not known as such: make them DTensor parameters, or "
                "save model.state_dict() on each rank yourself",
            )
