# SPDX-License-Identifier: BSD-3-Clause
"""The op table as everybody calls it: each op goes to the back end for its tensors' device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from preamp.core.away import values_in
from preamp.core.tensors import devices_of, has_sharded, locals_of
from preamp.core.torch_private.shards import sharded_as
from preamp.kernels.ops import Census, Column, Ops, Tensors
from preamp.kernels.plain import Plain
from preamp.kernels.rules import LambRule, Rule
from preamp.kernels.update import Update
from preamp.kernels.vectors import norm, stack


def _on_each(op: str, decides: int = 0) -> Any:
    """An op of which each place of its lists is computed by itself; see `Ops` for what it takes.

    Each goes to the device of its tensor in the list that ``decides``. Returned is what came back
    for each, in the order of the lists; of ops in place nothing does.
    """

    def run(self: ByDevice, *given: Any) -> Any:
        given = tuple(
            [locals_of(cast("Tensors", a)) if isinstance(a, Sequence) else a for a in given]
        )
        found: dict[int, Any] = {}
        for where, places in _by_device(given[decides]).items():
            results = getattr(self.on(where), op)(*pick(places, *given))
            if results is not None:
                found.update(zip(places, results, strict=True))
        return [found[place] for place in range(len(found))]

    run.__name__ = op
    return run


_widen_add = _on_each("widen_add")


class ByDevice(Ops):
    """Every op of the table, handed on by device; ``name`` is what it was asked for by.

    ``on(device)`` is the back end for the tensors of one device.
    """

    def __init__(self, name: str, ops_of: Callable[[torch.device], Ops]) -> None:
        """Choose by ``ops_of``, once for each device."""
        self.name = name
        self.on = functools.cache(ops_of)

    def census(self, grads: Tensors, device: torch.device, *, with_norm: bool = False) -> Census:
        grads = locals_of(grads)
        groups = _by_device(grads)
        if len(groups) < 2:
            here = self.on(next(iter(groups), device))
            return here.census(grads, device, with_norm=with_norm)
        found_inf = torch.zeros((), dtype=torch.float32, device=device)
        largest: dict[int, torch.Tensor] = {}
        norms: list[torch.Tensor] = []
        for where, places in groups.items():
            own = [grads[place] for place in places]
            part = self.on(where).census(own, device, with_norm=with_norm)
            found_inf = torch.maximum(found_inf, part.found_inf)
            if part.max_abs is not None:
                largest.update(zip(places, part.max_abs.unbind(), strict=True))
            if part.norm is not None:
                norms.append(part.norm)
        zero = torch.zeros_like(found_inf)  # where nothing was found, and all is finite
        each = {place: largest.get(place, zero) for place in range(len(grads))}
        return Census(
            found_inf,
            norm(stack(norms)) if with_norm else None,
            _in_order(each) if largest else None,
        )

    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        wide = _widen_add(self, halves, factors, addends)
        if has_sharded(halves):
            return [sharded_as(local, half) for local, half in zip(wide, halves, strict=True)]
        return wide

    take_over_ = _on_each("take_over_")
    split_ = _on_each("split_", decides=1)
    join_ = _on_each("join_", decides=2)
    axpby_ = _on_each("axpby_")

    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        tensors = locals_of(tensors)
        groups = _by_device(tensors)
        if len(groups) < 2:
            return self.on(next(iter(groups), device)).l2norms(tensors, factor, device)
        norms: dict[int, torch.Tensor] = {}
        for where, places in groups.items():
            own = [tensors[place] for place in places]
            by = None if factor is None else factor.to(where)
            part = self.on(where).l2norms(own, by, device)
            norms.update(zip(places, part.unbind(), strict=True))
        return _in_order(norms)

    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        tensors = locals_of(tensors)
        groups = _by_device(tensors)
        if len(groups) < 2:
            return self.on(next(iter(groups), device)).l2norm(tensors, factors, device)
        return super().l2norm(tensors, factors, device)

    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        if params:
            own, update = _own_parts((params, grads, *state), update)
            self.on(own[0][0].device).update_(*own, rule=rule, update=update)


def lamb_norms(
    params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
) -> torch.Tensor:
    """The ``|p|`` and ``|u|`` of LAMB, ``(2, n)``, of this rank's parts; mutates nothing.

    The definition computes them, where the moments are: an update measures whole tensors itself.
    """
    own, update = _own_parts((params, values_in(grads), *state), update)
    home = own[-1][0].device
    near = [[tensor.to(home) for tensor in column] for column in own]
    if update.halves is not None:
        halves = [None if half is None else half.to(home) for half in update.halves]
        update = replace(update, halves=halves)
    return Plain(fuses=False).lamb_norms(*near, rule=rule, update=update)


def _own_parts(lists: Sequence[Tensors], update: Update) -> tuple[Sequence[Tensors], Update]:
    """What an update rule is told, of sharded tensors this rank's parts."""
    if not has_sharded(lists[0]):
        return lists, update
    halves = None if update.halves is None else locals_of(update.halves)
    update = replace(update, halves=halves, standing=None)  # lists of parts are new in each step
    if update.stored is not None:
        stored = update.stored
        lows = None if stored.lows is None else locals_of(stored.lows)
        scales = tuple([None if row is None else locals_of(row) for row in stored.scales])
        update = replace(update, stored=replace(stored, lows=lows, scales=scales))
    return [locals_of(column) for column in lists], update


def _by_device(tensors: Tensors) -> dict[torch.device, Sequence[int]]:
    """Where the tensors of each device stand."""
    devices = devices_of(tensors)
    if len(devices) < 2:
        return dict.fromkeys(devices, range(len(tensors)))
    groups: dict[torch.device, list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault(tensor.device, []).append(place)
    return dict(groups)


def _in_order(numbers: dict[int, torch.Tensor]) -> torch.Tensor:
    """One vector of the numbers of all places; no index, whose upload would be waited for."""
    return stack([numbers[place] for place in range(len(numbers))])


def pick(places: Sequence[int], *given: Any) -> Sequence[Any]:
    """The places of what is a list, and all else as it is."""
    if isinstance(places, range):  # all of them
        return given
    return [[arg[place] for place in places] if isinstance(arg, Sequence) else arg for arg in given]
