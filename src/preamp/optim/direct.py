# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of parameters that the optimizer updates itself, without a master."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch

from preamp.core.away import values_of, zeros_away
from preamp.core.tensors import grad_of, local_of, version_of, versions_of, with_gradients
from preamp.kernels import Ops

Parameters = Iterable[torch.Tensor]
Factor = torch.Tensor | float
_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


def _beside(factor: Factor, grad: torch.Tensor) -> Factor:
    return factor.to(grad.device) if isinstance(factor, torch.Tensor) else factor


def negative_zeros(param: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """Zeros unlike those of a script; without memory if gradients of ``param`` wait elsewhere."""
    return zeros_away(param) if waits and param.is_cuda else torch.full_like(param, -0.0)


def is_zeroed(grad: torch.Tensor) -> bool:
    """Whether ``grad`` is zeros as a script leaves them, all without a sign. Synchronises."""
    local = local_of(values_of(grad))
    return not bool(local.any()) and not bool(torch.signbit(local).any())


def has_nonzero(grad: torch.Tensor) -> bool:
    """Whether ``grad`` has a value other than zero; nan counts. Synchronises."""
    values = values_of(grad)
    return bool((values.coalesce().values() if values.is_sparse else values).any())


class DirectGradients:
    """Keeps unscaled gradients apart while a backward adds scaled ones.

    One backward goes `begin`, `merge`, `commit`. Until `commit` everything can be taken back
    with `put_back`, so an exception in the body or while unscaling loses nothing. An interrupted
    `commit` or `put_back` may run again, and whole ones may too.

    Set aside, an earlier gradient is away during the backward and added afterwards: losses with
    any scales can be summed, exactly. Carried, it stays in place, multiplied by this backward's
    scale; exact for powers of two. That is for gradients which a hook reduces over ranks, and that
    this rank alone has accumulated: it must find the whole sum, or they would never be reduced. And
    for a block that a `GradScaler` holds open: what a script zeroes or drops in it must be all
    there is.
    """

    def __init__(self, ops: Ops) -> None:
        """Start with nothing set aside."""
        self._ops = ops
        self.params: Sequence[torch.Tensor] = ()  # whose gradients the backward makes
        # Earlier gradients, or copies of them if they ``_are_carried`` along in place, with their
        # parameters, by the ``id`` of these; ``None`` where no backward is under way
        self._aside: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
        self._are_carried = False
        # Of the gradients as the last merge left them, -1 where there was none
        self._versions: dict[int, int] = {}

    @property
    def has_earlier(self) -> bool:
        """Whether an earlier gradient will be part of the result, away or not."""
        return bool(self._aside)

    def begin(
        self,
        params: Sequence[torch.Tensor],
        carry: Factor | None = None,
        *,
        may_be_overwritten: bool = False,
    ) -> None:
        """Begin a backward. Mutates ``grad`` of ``params``: ``None``, or multiplied in place.

        ``carry`` is the scale of the coming backward if earlier gradients stay where they are.
        ``may_be_overwritten`` says that a hook may write to the memory that gradients lie in.
        """
        self.params = params
        some, grads = with_gradients(params)
        kept = grads
        if may_be_overwritten or carry is not None:
            kept = [grad.clone() for grad in grads]
        self._are_carried = carry is not None
        # All that `put_back` needs, before anything changes
        self._aside = dict(zip(map(id, some), zip(some, kept, strict=True), strict=True))
        try:
            if carry is None:
                for param in some:
                    param.grad = None
            elif isinstance(carry, torch.Tensor):  # else it is 1
                with torch.no_grad():
                    self._ops.scale_add_(grads, carry, [None] * len(grads))
        except BaseException:
            self.put_back()
            raise

    def set_aside_reached(self, param: torch.Tensor) -> None:
        """Set one aside as a backward reaches its parameter, if it has one. Mutates ``grad``.

        Where there is none any more, the script has dropped all, and what is away with it.
        """
        aside = self._aside = {} if self._aside is None else self._aside
        aside.pop(id(param), None)
        if param.grad is not None:
            aside[id(param)] = param, param.grad
            param.grad = None

    def put_back(self) -> None:
        """Restore what was there before `begin`, but for carried gradients since dropped."""
        aside = self._aside
        if aside is None:
            return
        for param in self.params:
            _, earlier = aside.get(id(param), (param, None))
            if earlier is None or not (self._are_carried and param.grad is None):
                param.grad = earlier
                self._versions.pop(id(param), None)  # a copy's version says nothing
        self._aside = None

    def merge(self, factor: Factor | None) -> None:
        """Unscale new gradients and add old ones, in place: ``grad = grad * factor + aside``."""
        aside = {} if self._are_carried or self._aside is None else self._aside
        if factor is None and not aside:
            return
        news: list[torch.Tensor] = []
        olds: list[torch.Tensor | None] = []
        some, grads = with_gradients(self.params)
        if not aside and not any(map(_requires_grad, grads)):  # as in most steps
            news, some = grads, []
            olds += [None] * len(grads)
        for param in some:
            _, old = aside.get(id(param), (param, None))
            if old is None and factor is None:
                continue
            grad = param.grad
            if grad.requires_grad:  # of create_graph: a penalty on it may follow
                wide = grad if factor is None else grad * _beside(factor, grad)
                param.grad = wide if old is None else wide + old
            else:
                news.append(grad)
                olds.append(old)
        if not news:
            return
        with torch.no_grad():
            self._ops.scale_add_(news, 1.0 if factor is None else factor, olds)

    def commit(self) -> None:
        """End the backward; what got nothing new comes back. Cannot fail."""
        if not self._are_carried:
            for param, earlier in (self._aside or {}).values():
                if param.grad is None:
                    param.grad = earlier
        versions = versions_of(list(map(grad_of, self.params)))
        self._versions.update(zip(map(id, self.params), versions, strict=True))
        self._aside = None

    def holds_gradient(self, params: Parameters, *, of_blocks: bool = True) -> bool:
        """Whether any of ``params`` has a gradient that was not zeroed since the last `commit`.

        Unless ``of_blocks`` those do not count that are as the last `commit` has left them.
        Values are looked at, and the device synchronised with, only where somebody wrote to a
        gradient in the meantime.
        """
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if version_of(grad) == self._versions.get(id(param)):
                if of_blocks:
                    return True
            elif has_nonzero(grad):
                return True
        return False

    def forget(self) -> None:
        """Drop what was set aside."""
        if self._aside is not None:
            self._aside.clear()
