# SPDX-License-Identifier: BSD-3-Clause
"""How gradients of ranks become one, where torch's own way is not what was asked for.

Also their reduction at the end of each backward, whatever forwards they came from.
"""

# torch reads the annotations of `reduce_bucket`, and wants types, not strings: no __future__ here.
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from preamp.core.torch_private.autograd import after_backward, backward_under_way
from preamp.distributed.groups import collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """What happens to a bucket of gradients: ``(Σ gradient · before) · after``."""

    before: float  # factor before the sum over the ranks; keeps half sums within range
    after: float  # factor after it
    in_float32: bool  # whether half gradients are summed in float32 instead of their own dtype
    group: dist.ProcessGroup  # the ranks to sum over


def reduce_buffer(state: Averaging, buffer: torch.Tensor) -> torch.Tensor:
    """Sum ``buffer`` over the ranks, in place and to the end; maybe in float32, rounded once."""
    summed = _prepared(state, buffer)
    collectives.all_reduce(summed, group=state.group)
    return _finished(state, buffer, summed)


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


class DelayedReduction:
    """Reduces what a backward has accumulated in ``param.grad`` when it ends.

    torch's reducer reduces the first backward after a forward, and expects one gradient for each
    parameter. This one counts neither: it serves several backwards through one forward, and
    several forwards before one backward, with different parameters each.

    A parameter is reduced if any rank has a new gradient for it; the others contribute what they
    hold, or zeros. Which ones these are is exchanged first, so that ranks need not agree.
    """

    def __init__(
        self, wrapper: DistributedDataParallel, averaging: Averaging, *, makes_views: bool
    ) -> None:
        """Hook the parameters that require grad; the hooks do nothing once this object is gone.

        The wrapper's ``require_backward_grad_sync`` is asked during backward; what it was off for
        is reduced with the next backward that it is on for. ``makes_views`` makes gradients views
        of the buffer they were reduced in.
        """
        params = [param for param in wrapper.parameters() if param.requires_grad]
        self._params = params
        self._wrapper = weakref.ref(wrapper)  # no cycle, which would keep the hooks alive
        self._averaging = averaging
        self._makes_views = makes_views
        self._new: set[int] = set()
        self._awaited = -1
        for index, param in enumerate(params):
            note = partial(_note, weakref.ref(self), index)
            cast("Any", param).register_post_accumulate_grad_hook(note)

    def note(self, index: int) -> None:
        """Remember that a parameter got a gradient, and wait for the end of this backward."""
        self._new.add(index)
        wrapper, current = self._wrapper(), backward_under_way()
        if wrapper is None or not wrapper.require_backward_grad_sync:
            return
        if self._awaited != current:
            self._awaited = current
            after_backward(self._reduce)

    @torch.no_grad()
    def _reduce(self) -> None:
        params = self._with_news()
        self._new.clear()
        for param in params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        for bucket in _buckets(params):
            grads = [_grad(param).detach() for param in bucket]
            if len(grads) == 1 and grads[0].is_sparse:
                bucket[0].grad = reduce_buffer(self._averaging, grads[0].coalesce())
                continue
            flat = reduce_buffer(self._averaging, torch.cat([grad.reshape(-1) for grad in grads]))
            parts = torch.split(flat, [grad.numel() for grad in grads])
            for param, grad, part in zip(bucket, grads, parts, strict=True):
                if self._makes_views:
                    param.grad = part.view(grad.shape)
                else:
                    grad.copy_(part.view(grad.shape))

    def _with_news(self) -> list[nn.Parameter]:
        """The parameters that any rank has a new gradient for."""
        news = torch.zeros(len(self._params), dtype=torch.int32)
        news[[i for i in self._new if self._params[i].grad is not None]] = 1
        everywhere = news.to(self._params[0].device)
        collectives.all_reduce(everywhere, group=self._averaging.group)
        counts = cast("list[int]", cast("Any", everywhere).tolist())
        return [param for param, count in zip(self._params, counts, strict=True) if count]


def _note(reduction: weakref.ref[DelayedReduction], index: int, param: torch.Tensor) -> None:
    """A parameter's hook."""
    if (alive := reduction()) is not None:
        alive.note(index)


def _grad(param: nn.Parameter) -> torch.Tensor:
    grad: Any = param.grad
    return grad


def _buckets(params: Sequence[nn.Parameter]) -> list[list[nn.Parameter]]:
    """One per dtype and device, and one for each sparse gradient."""
    found: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        grad = _grad(param)
        key = id(param) if grad.is_sparse else (grad.dtype, grad.device)
        found.setdefault(key, []).append(param)
    return list(found.values())
