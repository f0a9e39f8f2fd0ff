# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of parameters that the optimizer updates itself, without a master."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from preamp.core.away import is_away, values_of, zeros_away
from preamp.core.dtypes import is_half
from preamp.core.ranks import has_process_group
from preamp.core.tensors import grad_of, local_of, version_of, versions_of, with_gradients
from preamp.kernels import Ops

Parameters = Iterable[torch.Tensor]
Factor = torch.Tensor | float
_requires_grad: Callable[[Any], bool] = attrgetter("requires_grad")


def _beside(factor: Factor, grad: torch.Tensor) -> Factor:
    return factor.to(grad.device) if isinstance(factor, torch.Tensor) else factor


class Placeholders:
    """Zeros in the place of gradients that are away during a backward.

    Without them a script that drops or zeroes a gradient within the block would do nothing. Not
    where there is a process group: hooks that reduce may exchange gradients for others.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._zeros: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        # Until the first gradient comes; ``None`` where none can come
        self._hooks: dict[int, RemovableHandle | None] = {}
        self.dropped: set[int] = set()

    def put(self, param: torch.Tensor, earlier: torch.Tensor, *, waits: bool = False) -> None:
        """Put zeros where ``earlier`` was. Mutates ``param.grad``.

        They take no memory where gradients wait on the host, as ``waits`` or ``earlier`` says.
        """
        if has_process_group() or earlier.is_sparse:
            return
        param.grad = zeros = negative_zeros(param, waits=waits or is_away(earlier))
        self._zeros[id(param)] = (param, zeros, version_of(zeros))
        hook = partial(self._look, id(param))
        self._hooks[id(param)] = param.register_hook(hook) if param.requires_grad else None  # pyright: ignore

    def _look(self, key: int, new: torch.Tensor | None = None) -> None:
        """Look whether the script has zeroed what nothing was added to yet."""
        del new
        _, zeros, version = self._zeros[key]
        if version_of(zeros) != version and is_zeroed(zeros):
            self.dropped.add(key)
        if hook := self._hooks.pop(key, None):
            hook.remove()

    def take_away(self) -> None:
        """Drop those that nothing was added to; notes what the script `dropped` or zeroed."""
        for key in list(self._hooks):
            self._look(key)
        for key, (param, zeros, version) in self._zeros.items():
            grad = param.grad
            if grad is zeros:
                if version_of(zeros) == version:
                    param.grad = None
            elif grad is None or grad.grad_fn is None:  # create_graph adds out of place
                self.dropped.add(key)
        self._zeros.clear()

    def forget(self) -> None:
        """Another backward may begin."""
        for hook in filter(None, self._hooks.values()):
            hook.remove()
        self._hooks.clear()
        self._zeros.clear()
        self.dropped.clear()


@dataclass(frozen=True, slots=True, eq=False)
class _Earlier:
    """A gradient from before the backward; a copy of it if it ``is_carried`` along in place."""

    param: torch.Tensor
    grad: torch.Tensor
    is_carried: bool


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
    scale; exact for powers of two. That is for gradients which a hook reduces over ranks: it must
    find the whole sum, or what this rank alone has accumulated would never be reduced. And for
    those that are left scaled: what the script zeroes in between must be all there is. Half ones
    might overflow by it, and are carried for the first reason only.
    """

    def __init__(self, ops: Ops) -> None:
        """Start with nothing set aside."""
        self._ops = ops
        self.params: Sequence[torch.Tensor] = ()  # whose gradients the backward makes
        # Earlier gradients; ``None`` where no backward is under way
        self._aside: dict[int, _Earlier] | None = None
        # Of the gradients as the last merge left them, -1 where there was none
        self._versions: dict[int, int] = {}
        self._placeholders = Placeholders()
        self._raw: dict[int, int] = {}  # of those left scaled whose earlier one is away

    @property
    def has_aside(self) -> bool:
        """Whether an earlier gradient is away."""
        return any(not earlier.is_carried for earlier in (self._aside or {}).values())

    @property
    def has_earlier(self) -> bool:
        """Whether an earlier gradient will be part of the result, away or not."""
        return bool(self._aside)

    def begin(
        self,
        params: Sequence[torch.Tensor],
        carry: Factor | None = None,
        carry_wide: Factor | None = None,
        *,
        may_be_overwritten: bool = False,
    ) -> None:
        """Begin a backward. Mutates ``grad`` of ``params``: ``None``, or multiplied in place.

        ``carry`` is the scale of the coming backward if earlier gradients stay where they are,
        ``carry_wide`` the same for those that are not half. ``may_be_overwritten`` says that a hook
        may write to the memory that gradients lie in.
        """
        self.params = params
        aside: dict[int, _Earlier] = {}
        scaled: dict[Factor, list[torch.Tensor]] = {}
        for param in params:
            grad = param.grad
            if grad is not None:
                by = carry_wide if carry is None and not is_half(grad) else carry
                kept = grad.clone() if may_be_overwritten or by is not None else grad
                aside[id(param)] = _Earlier(param, kept, is_carried=by is not None)
                if by is not None and not (isinstance(by, float) and by == 1.0):
                    scaled.setdefault(by, []).append(grad)
        self._aside = aside  # all that `put_back` needs, before anything changes
        try:
            for earlier in aside.values():
                if not earlier.is_carried:
                    earlier.param.grad = None
                    self._placeholders.put(earlier.param, earlier.grad)
            for by, grads in scaled.items():
                with torch.no_grad():
                    self._ops.scale_add_(grads, by, [None] * len(grads))
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
            aside[id(param)] = _Earlier(param, param.grad, is_carried=False)
            param.grad = None

    def end_body(self) -> None:
        """The body of the block has ended; see `Placeholders.take_away`."""
        self._placeholders.take_away()

    def note_raw(self) -> None:
        """Gradients stay scaled: those away get zeros, so that a script can zero or drop all."""
        self._forget_dropped()
        for key, earlier in (self._aside or {}).items():
            if not earlier.is_carried:
                if earlier.param.grad is None:
                    earlier.param.grad = torch.zeros_like(earlier.grad)
                self._raw[key] = version_of(earlier.param.grad)

    def reconcile_raw(self) -> None:
        """Take in that the script dropped or zeroed gradients left scaled, and so all of them."""
        aside = self._aside or {}
        for key, version in self._raw.items():
            earlier = aside.get(key)
            now = None if earlier is None else earlier.param.grad
            if now is None or (version_of(now) != version and not has_nonzero(now)):
                aside.pop(key, None)
        self._raw.clear()

    def _forget_dropped(self) -> None:
        if self._aside is not None:
            for key in self._placeholders.dropped:
                self._aside.pop(key, None)
        self._placeholders.forget()

    def put_back(self) -> None:
        """Restore what was there before `begin`, but for carried gradients since dropped."""
        aside = self._aside
        if aside is None:
            return
        for key in [k for k, e in aside.items() if e.is_carried and e.param.grad is None]:
            del aside[key]
        for param in self.params:
            if id(param) not in aside:
                param.grad = None
        for key, earlier in aside.items():
            earlier.param.grad = earlier.grad
            self._versions.pop(key, None)  # it may be a copy, whose version says nothing
        self._placeholders.forget()
        self._aside = None

    def merge(self, factor: Factor | None) -> None:
        """Unscale new gradients and add old ones, in place: ``grad = grad * factor + aside``."""
        aside = self._aside or {}
        if factor is None and not aside:
            return
        news: list[torch.Tensor] = []
        olds: list[torch.Tensor | None] = []
        some, grads = with_gradients(self.params)
        if not aside and not any(map(_requires_grad, grads)):  # as in most steps
            news, some = grads, []
            olds += [None] * len(grads)
        for param in some:
            earlier = aside.get(id(param))
            if id(param) in self._placeholders.dropped:
                earlier = None
            old = None if earlier is None or earlier.is_carried else earlier.grad
            if old is None and factor is None:
                continue
            grad = param.grad
            if grad.requires_grad:  # of create_graph: a penalty on it may follow
                wide = grad if factor is None else grad * _beside(factor, grad)
                param.grad = wide if old is None else wide + old
            else:
                news.append(grad)
                olds.append(old)
        with torch.no_grad():
            self._ops.scale_add_(news, 1.0 if factor is None else factor, olds)

    def commit(self, factor: Factor | None = None) -> None:
        """End the backward; what got nothing new comes back. Cannot fail.

        The gradients are unscaled by ``factor`` already.
        """
        del factor
        self._forget_dropped()
        for earlier in (self._aside or {}).values():
            if not earlier.is_carried and earlier.param.grad is None:
                earlier.param.grad = earlier.grad
        versions = versions_of(list(map(grad_of, self.params)))
        self._versions.update(zip(map(id, self.params), versions, strict=True))
        self._aside = None

    def holds_gradient(self, params: Parameters) -> bool:
        """Whether any of ``params`` has a gradient that was not zeroed since the last `commit`.

        Values are looked at, and the device synchronised with, only where somebody wrote to a
        gradient in the meantime.
        """
        for param in params:
            grad = param.grad
            if grad is None:
                continue
            if version_of(grad) == self._versions.get(id(param)) or has_nonzero(grad):
                return True
        return False

    def forget(self) -> None:
        """Drop what was set aside."""
        if self._aside is not None:
            self._aside.clear()
        self._placeholders.forget()
