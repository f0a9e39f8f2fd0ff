# SPDX-License-Identifier: BSD-3-Clause
"""Ops that do the same to each element: planned lists in kernels, other places in `plain`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from preamp.kernels.ops import Column, Ops, Tensors
from preamp.kernels.plans import Plan, check_lengths, pick
from preamp.kernels.update import Scalar

_LOWS = frozenset({torch.int16})


class Combining(Ops):
    """Linear combinations, casts among them, and what splits and joins."""

    plain: Ops

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
