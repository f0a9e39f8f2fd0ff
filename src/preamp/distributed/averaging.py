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


# torch reads the annotations of a hook, and wants types instead of strings: no __future__ above.
def reduce_bucket(
    state: Averaging,
    bucket: dist.GradBucket,  # pyright: ignore[reportPrivateImportUsage]
) -> torch.futures.Future[torch.Tensor]:
    """Sum one bucket over the ranks as ``state`` says; a communication hook of torch's DDP.

    Arithmetic is in the dtype of the bucket, or in float32 with one rounding at the end if
    ``state.in_float32``.
    """
    buffer = bucket.buffer()
    widen = state.in_float32 and buffer.dtype in (torch.float16, torch.bfloat16)
    summed = buffer.float() if widen else buffer
    if state.before != 1.0:
        summed.mul_(state.before)
    work = collectives.all_reduce(summed, group=state.group, async_op=True)

    def finish(future: Any) -> torch.Tensor:
        total: torch.Tensor = future.value()[0]
        if state.after != 1.0:
            total.mul_(state.after)
        return buffer.copy_(total) if widen else total

    return work.get_future().then(finish)
