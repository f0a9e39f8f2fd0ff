# SPDX-License-Identifier: BSD-3-Clause
"""How the gradients of the ranks become one, where torch's own way is not what was asked for."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from preamp.distributed.groups import collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """What happens to a bucket of gradients: ``(Σ gradient · before) · after``.

    Attributes:
        before: Factor before the sum over the ranks; keeps half sums within range.
        after: Factor after it.
        in_float32: Whether half gradients are summed in float32 instead of their own dtype.
        group: The ranks to sum over.
    """

    before: float
    after: float
    in_float32: bool
    group: dist.ProcessGroup


def reduce_buffer(state: Averaging, buffer: torch.Tensor) -> torch.Tensor:
    """Sum ``buffer`` over the ranks as ``state`` says, wait for it, and return it in its dtype.

    Arithmetic is in the dtype of the buffer, which is mutated, or in float32 with one rounding at
    the end if ``state.in_float32``.
    """
    summed = _prepared(state, buffer)
    collectives.all_reduce(summed, group=state.group)
    return _finished(state, buffer, summed)


# torch reads the annotations of a hook, and wants types instead of strings: no __future__ above.
def reduce_bucket(
    state: Averaging,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[torch.Tensor]:
    """`reduce_buffer` without waiting; a communication hook of torch's DDP."""
    buffer = bucket.buffer()
    work = collectives.all_reduce(_prepared(state, buffer), group=state.group, async_op=True)

    def finish(future: Any) -> torch.Tensor:
        return _finished(state, buffer, future.value()[0])

    return work.get_future().then(finish)


def _prepared(state: Averaging, buffer: torch.Tensor) -> torch.Tensor:
    widen = state.in_float32 and buffer.dtype in (torch.float16, torch.bfloat16)
    summed = buffer.float() if widen else buffer
    return summed.mul_(state.before) if state.before != 1.0 else summed


def _finished(state: Averaging, buffer: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    if state.after != 1.0:
        total.mul_(state.after)
    return total if total.dtype == buffer.dtype else buffer.copy_(total)
