# SPDX-License-Identifier: BSD-3-Clause
"""Averages over all ranks on demand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_type
from preamp.distributed.flat import flat_dist_call
from preamp.distributed.groups import collectives, require_group
from preamp.distributed.masters import broadcast_masters


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
            f"Reducer was given a {type(nested).__name__} among the gradients",
            "Allowed is a module, or gradient tensors in any nesting of iterables",
            "Pass the module itself, or [p.grad for p in parameters] after a backward",
        )
