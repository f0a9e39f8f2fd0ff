# SPDX-License-Identifier: BSD-3-Clause
"""Back ends with kernels: these take planned lists, and `plain` other places.

A `Work` is one launch of an update: a plan whose lists have names, with what the update says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence, Set
from typing import Any, ClassVar, TypeVar

import torch

from preamp.core.tensors import devices_of
from preamp.kernels.checks import check_shapes, check_stored
from preamp.kernels.ops import Column, Ops, Tensors
from preamp.kernels.plans import STORED_DTYPES, Plan, check_lengths, pick, planned
from preamp.kernels.rules import Rule
from preamp.kernels.stored import Format, Stored, lead
from preamp.kernels.update import Scalar, Update, norms_at

PLAIN = Stored()
_NOTHING = Update(step=0)
_LOWS = frozenset({torch.int16})


class Work(ABC):
    """One launch of an update.

    Its lists are called ``P`` and ``G``, ``M`` and ``V`` (state), ``H`` (halves), ``L`` (lows),
    ``N`` (state of one number for each tensor), ``S`` and ``T`` (scales of ``M`` and ``V``).
    """

    __slots__ = ("dtypes", "formats", "leads", "names", "norms", "plan", "rule", "states", "stored",
                 "update")  # fmt: skip
    only_on: ClassVar[str | None] = None
    """The type of devices that kernels work on, if not all that they are given."""

    def __init__(self, plan: Plan, names: Sequence[str], rule: Rule, update: Update) -> None:
        self.plan, self.names = plan, names
        self.dtypes: dict[str, Any] = dict(zip(names, plan.dtypes, strict=True))
        self.tell(rule, update)
        p, half = self.dtypes["P"], self.dtypes["H"]
        # Whether there are half weights, which parameters refine
        self.leads = update.halves_lead and half is not None and lead(p, half)
        # The names of state that kernels read and write
        self.states = [name for name in "MV" if self.dtypes.get(name) is not None]
        # How that is kept
        kept = [*self.stored.formats[: len(self.states)]]
        self.formats = kept + [Format.PLAIN] * (len(self.states) - len(kept))

    def tell(self, rule: Rule, update: Update) -> None:
        """Take what differs from one update of the same lists to the next."""
        self.rule, self.update, self.stored = rule, update, update.stored or PLAIN
        # As given, if they are
        self.norms = None if update.norms is None else norms_at(update.norms, self.plan.places)

    @abstractmethod
    def start(self) -> None:
        """Launch the update."""

    def rows(self, name: str) -> Tensors:
        """The list of this name, without tensors if there is none."""
        return self.plan.rows[self.names.index(name)] if name in self.names else ()

    @property
    def by_chance(self) -> bool:
        """Whether state is kept in fewer bits."""
        return _by_chance(self.stored)

    @property
    def in_blocks(self) -> bool:
        """Whether some of it is in blocks, with a scale each."""
        return any([kind.has_scales for kind in self.stored.formats])

    def numbers_and_starts(self) -> tuple[Sequence[int], Sequence[int]]:
        """What the chances of each tensor go by."""
        stored, places = self.stored, self.plan.places
        nothing = [0] * len(places)
        return (
            pick(stored.numbers, places) if stored.numbers else nothing,
            pick(stored.starts, places) if stored.starts else nothing,
        )

    def note_written(self) -> None:
        """Let autograd know of all that the update has changed."""
        left = ("G", "M") if self.rule.leaves_state else ("G",)
        for name, row in zip(self.names, self.plan.rows, strict=True):
            if row and name not in left:
                torch.autograd.graph.increment_version(row)


W = TypeVar("W", bound=Work)


def works_of(
    kind: type[W], params: Tensors, grads: Tensors, *state: Tensors, rule: Rule, update: Update
) -> tuple[list[W], list[int]]:
    """Plan an update: its launches, of a back end's ``kind``, and the places that no kernel takes.

    Raises `ValueError` for lists that do not fit; nothing was changed yet.
    """
    stored, standing = update.stored or PLAIN, update.standing
    shaped = state[: len(state) - rule.has_numbers]
    numbers = state[len(shaped) :]
    scales = stored.scales[: len(shaped)]
    lists = [params, grads, *shaped, update.halves, stored.lows, *numbers, *scales]
    names = ["P", "G", *"MV"[: len(shaped)], "H", "L", *"N"[: len(numbers)], *"ST"[: len(scales)]]
    # What works are made for, besides the lists
    told = kind, type(rule), rule.leaves_state, update.halves_lead, stored.formats, stored.seed
    if standing is not None and standing.recall(lists, told):
        for work in standing.works:
            work.tell(rule, update)
        return standing.works, []
    check_lengths(*[column for column in lists if column is not None])
    check_stored(params, update)
    plans, others = planned(
        *lists,
        scalars=len(numbers) + len(scales),
        codes=frozenset() if update.stored is None else STORED_DTYPES,
        in_order=_by_chance(stored),
        only_on=kind.only_on,
    )
    if others:  # what does not fit is among them
        check_shapes(*[row for row in lists[: len(shaped) + 3] if row is not None])
    works = [kind(plan, names, rule, update) for plan in plans]
    if standing is not None and not others:
        standing.note(lists, told, works)
    return works, others


def _by_chance(stored: Stored) -> bool:
    return any([kind is not Format.PLAIN for kind in stored.formats])


# -- ops -----------------------------------------------------------------------------------------


class Combining(Ops):
    """All ops but what measures, which back ends have of their own."""

    plain: Ops
    works: ClassVar[type[Work]]

    def _planned(
        self, *lists: Column, codes: Set[torch.dtype] = frozenset()
    ) -> tuple[list[Plan], list[int]]:
        """See `planned`: plans, and the places that no kernel of this back end can take."""
        plans, others = planned(*lists, codes=codes, only_on=self.works.only_on)
        self._check({*devices_of(pick(lists[0], others)), *[plan.device for plan in plans]})
        return plans, others

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
                work.plan.rows, work.norms = (), None
                work.update, work.stored = _NOTHING, PLAIN
        if others:
            lists = [pick(row, others) for row in (params, grads, *state)]
            self._check(devices_of(lists[0]))
            self.plain.update_(*lists, rule=rule, update=update.at(others))

    def _check(self, devices: Set[torch.device]) -> None:
        """Refuse devices on which this back end does not compute."""
