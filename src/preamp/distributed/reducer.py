# SPDX-License-Identifier: BSD-3-Clause
"""Averages over all ranks on demand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from preamp.core.errors import bad_type, with_article
from preamp.distributed.groups import collectives, require_group
from preamp.engine import find_engine

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


def broadcast_masters(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the masters of ``module``'s parameters from the first rank of ``group``, in place.

    Masters hold what the weights were before ``initialize`` cast them. If each rank drew its own,
    broadcasting the half weights alone would leave the first rank with exact masters and the others
    with rounded ones, and the ranks would drift apart.
    """
    engine = find_engine(module)
    if engine is not None:
        masters = [engine.master_of(param) for param in module.parameters()]
        first = collectives.get_global_rank(group, 0)
        flat_dist_call([m for m in masters if m is not None], collectives.broadcast, (first, group))
        engine.trust_masters(module.parameters())


class Reducer:
    """Averages gradients over the ranks when told to, for scripts that choose the moment.

    ``gradient = Σ gradient / world_size``, summed in the gradient's own dtype. Unlike
    `DistributedDataParallel` it hooks nothing: call ``reduce`` after ``backward``, inside the
    ``scale_loss`` block where there is one, so that overflow on one rank is seen on all.

    Attributes:
        module: The module, or ``None`` if gradients were given.
        grads: The gradients, or an empty list if a module was given.
    """

    def __init__(self, module_or_grads_list: nn.Module | Iterable[Any]) -> None:
        """Take a module or gradients; a module's parameters are broadcast from rank 0.

        Args:
            module_or_grads_list: A module, or gradient tensors in any nesting of iterables.

        Raises:
            PreampStateError: torch.distributed is not initialized.
            TypeError: Something other than tensors is among the gradients.

        Mutates:
            The module's parameters and their masters on all ranks but the first.
        """
        require_group("Reducer")
        self.module: nn.Module | None = None
        self.grads: list[torch.Tensor] = []
        if isinstance(module_or_grads_list, nn.Module):
            self.module = module_or_grads_list
            flat_dist_call(list(self.module.parameters()), collectives.broadcast, (0,))
            broadcast_masters(self.module, collectives.group.WORLD)
        else:
            self.grads = list(_gradients_in(module_or_grads_list))

    def reduce(self) -> None:
        """Average over all ranks, in place: the given gradients, or those the module has now.

        A parameter without gradient is left out; it must be without on every rank.
        """
        grads = self.grads
        if self.module is not None:
            grads = [p.grad for p in self.module.parameters() if p.grad is not None]
        flat_dist_call(grads, collectives.all_reduce)


def _gradients_in(nested: Any) -> Iterator[torch.Tensor]:
    """Any iterable is looked into, and anything else refused; `tensors_in` does neither."""
    if isinstance(nested, torch.Tensor):
        yield nested
    elif isinstance(nested, Iterable) and not isinstance(nested, (str, bytes)):
        for item in cast("Iterable[Any]", nested):
            yield from _gradients_in(item)
    else:
        raise bad_type(
            f"Reducer was given {with_article(type(nested).__name__)} among the gradients",
            "Allowed is a module, or gradient tensors in any nesting of iterables",
            "Pass the module itself, or [p.grad for p in parameters] after a backward",
        )
