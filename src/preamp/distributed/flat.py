# SPDX-License-Identifier: BSD-3-Clause
"""One collective on many tensors: a flat buffer per dtype and device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from preamp.distributed.groups import collectives

Tensors = Sequence[torch.Tensor]


def flat_dist_call(
    tensors: Tensors, call: Callable[..., Any], extra_args: Sequence[Any] | None = None
) -> None:
    """Run a collective on ``tensors`` as if they were one tensor.

    Tensors of one dtype and device are copied into a flat buffer, ``call(buffer, *extra_args)``
    is made on it, and the result is copied back. After ``torch.distributed.all_reduce`` the
    buffer is divided by the number of ranks, in its own dtype: the result is the average.

    Args:
        tensors: Dense tensors of any shapes and dtypes, in the same order on every rank.
        call: A collective that works in place, such as ``torch.distributed.broadcast``.
        extra_args: Its arguments after the tensor.

    Mutates:
        ``tensors``. Synchronises as ``call`` does.
    """
    with torch.no_grad():
        for bucket in _by_kind(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
            call(flat, *(extra_args or ()))
            if call is collectives.all_reduce:
                flat /= dist.get_world_size()
            sizes = [tensor.numel() for tensor in bucket]
            for tensor, part in zip(bucket, torch.split(flat, sizes), strict=True):
                tensor.detach().copy_(part.view(tensor.shape))


def _by_kind(tensors: Tensors) -> Iterable[list[torch.Tensor]]:
    buckets: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        buckets.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return buckets.values()
