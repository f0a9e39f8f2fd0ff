# SPDX-License-Identifier: BSD-3-Clause
"""Parts of tensors on their way between ranks, as bytes: any dtype, any back end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from preamp.core.shares import share_of
from preamp.distributed.groups import collectives
from preamp.optim.part import in_memory_order

_BUCKET_BYTES = 32 * 2**20  # of all ranks' parts: what an exchange needs beside the weights


def span_of(elements: int, rank: int, world_size: int) -> tuple[int, int]:
    """The first element that ``rank`` has, and the one after its last."""
    share = share_of(elements, world_size)
    return min(rank * share, elements), min((rank + 1) * share, elements)


def exchange_parts(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Complete dense ``tensors``, of each of which every rank has written its own span.

    All ranks of ``group`` make this call with the tensors in the same order. Mutates them.
    """
    for bucket in _buckets(tensors):
        _exchange(bucket, group)


def gather_parts(part: torch.Tensor, like: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Put a tensor together of the vectors of elements that ranks of ``group`` have.

    All of them make this call. ``like`` has the shape and strides of the whole, which has the dtype
    of ``part``, on every rank.
    """
    whole = torch.empty_like(like, dtype=part.dtype)
    start, stop = span_of(whole.numel(), group.rank(), group.size())
    in_memory_order(whole)[start:stop] = part
    exchange_parts([whole], group)
    return whole


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    open_ones: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.dtype, torch.device], int] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        size = tensor.numel() * tensor.element_size()
        if key in open_ones and sizes[key] + size > _BUCKET_BYTES:
            yield open_ones.pop(key)
        sizes[key] = size if key not in open_ones else sizes[key] + size
        open_ones.setdefault(key, []).append(tensor)
    yield from open_ones.values()


def _exchange(bucket: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    rank, world_size = group.rank(), group.size()
    flat = [in_memory_order(tensor) for tensor in bucket]
    shares = [share_of(tensor.numel(), world_size) for tensor in flat]
    own: Any = flat[0].new_zeros(sum(shares))
    for tensor, place in zip(flat, own.split(shares), strict=True):
        start, stop = span_of(tensor.numel(), rank, world_size)
        place[: stop - start] = tensor[start:stop]
    found: Any = own.new_empty(world_size, own.numel())
    collectives.all_gather(
        [row.view(torch.uint8) for row in found.unbind(0)], own.view(torch.uint8), group=group
    )
    for tensor, columns in zip(flat, found.split(shares, dim=1), strict=True):
        tensor.copy_(columns.reshape(-1)[: tensor.numel()])
