# SPDX-License-Identifier: BSD-3-Clause
"""Ops of back ends with kernels: planned lists in these, other places in `plain`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any, ClassVar

import torch

from preamp.kernels.ops import Column, Ops, Tensors
from preamp.kernels.plans import Plan, check_lengths, pick
from preamp.kernels.rules import LambRule, Rule
from preamp.kernels.update import Scalar, Update
from preamp.kernels.works import Work, works_of

_LOWS = frozenset({torch.int16})


class Combining(Ops):
    """All ops but what measures, which back ends have of their own."""

    plain: Ops
    works: ClassVar[type[Work]]

    @abstractmethod
    def _planned(
        self, *lists: Column, codes: Set[torch.dtype] = frozenset()
    ) -> tuple[list[Plan], list[int]]:
        """See `planned`: plans, and the places that no kernel of this back end can take."""

    @abstractmethod
    def _combine(
        self, plan: Plan, a: Scalar, b: Scalar = 1.0, factors: Sequence[torch.Tensor] = ()
    ) -> None:
        """``target = a * x + b * y`` for the three lists of a plan; no ``y`` means ``a * x``.

        ``factors`` have one for each of the caller's places in place of ``a``.
        """

    @abstractmethod
    def _take_over(self, plan: Plan) -> None:
        """`take_over_` for the two lists of a plan."""

    @abstractmethod
    def _convert(self, plan: Plan, *, joins: bool) -> None:
        """Split the first list of a plan into the others, or join these into it."""

    @torch.no_grad()
    def _each(
        self,
        lists: Sequence[Column],
        act: Callable[[Plan], None],
        rest: Callable[..., Any],
        codes: Set[torch.dtype] = frozenset(),
    ) -> None:
        """``act`` on plans, and ``rest`` on the lists of all other places."""
        check_lengths(*lists)
        plans, others = self._planned(*lists, codes=codes)
        for plan in plans:
            act(plan)
        if others:
            rest(*[pick(column, others) for column in lists])

    def axpby_(self, targets: Tensors, a: Scalar, xs: Tensors, b: Scalar, ys: Column) -> None:
        def rest(targets: Any, xs: Any, ys: Any) -> None:
            self.plain.axpby_(targets, a, xs, b, ys)

        self._each((targets, xs, ys), lambda plan: self._combine(plan, a, b), rest)

    def take_over_(self, masters: Tensors, halves: Tensors) -> None:
        self._each((masters, halves), self._take_over, self.plain.take_over_)

    def split_(self, wides: Tensors, halves: Tensors, lows: Column) -> None:
        def split(plan: Plan) -> None:
            self._convert(plan, joins=False)

        self._each((wides, halves, lows), split, self.plain.split_, _LOWS)

    def join_(self, halves: Tensors, lows: Tensors, wides: Tensors) -> None:
        def rest(wides: Any, halves: Any, lows: Any) -> None:
            self.plain.join_(halves, lows, wides)

        def join(plan: Plan) -> None:
            self._convert(plan, joins=True)

        self._each((wides, halves, lows), join, rest, _LOWS)

    @torch.no_grad()
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        check_lengths(halves, factors, addends)
        results = [
            torch.empty_like(half, dtype=torch.float32) if addend is None else addend
            for half, addend in zip(halves, addends, strict=True)
        ]
        plans, others = self._planned(results, halves, addends)
        for plan in plans:
            self._combine(plan, 1.0, 1.0, factors)
        if others:
            own = pick(halves, others), pick(factors, others), pick(addends, others)
            for place, result in zip(others, self.plain.widen_add(*own), strict=True):
                results[place] = result
        return results

    @torch.no_grad()
    def update_(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
    ) -> None:
        works, others = works_of(self.works, params, grads, *state, rule=rule, update=update)
        try:
            for work in works:
                work.start()
        finally:  # whoever keeps works keeps no tensors
            for work in works:
                work.plan.rows = ()
        if others:
            lists = [pick(row, others) for row in (params, grads, *state)]
            self._check(lists[0])
            self.plain.update_(*lists, rule=rule, update=update.at(others))

    @torch.no_grad()
    def lamb_norms(
        self, params: Tensors, grads: Tensors, *state: Tensors, rule: LambRule, update: Update
    ) -> torch.Tensor:
        told = replace(update, standing=None)
        works, others = works_of(self.works, params, grads, *state, rule=rule, update=told)
        if others or len(works) != 1:
            return self.plain.lamb_norms(params, grads, *state, rule=rule, update=update)
        return works[0].lamb_norms()

    def _check(self, tensors: Tensors) -> None:
        """Refuse tensors that lie where this back end does not compute."""
