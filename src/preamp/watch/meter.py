# SPDX-License-Identifier: BSD-3-Clause
"""Measuring the gradients and weights of one optimizer, and which weights a step left unchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from preamp.core.away import values_in, values_of
from preamp.core.dtypes import dtype_name, is_half
from preamp.core.tensors import local_of
from preamp.engine.core import ParameterNames
from preamp.engine.session import OptimizerSession
from preamp.kernels.plain.tally import Tally, blocks_of
from preamp.numerics import FORMATS, Measured, NumberFormat, TensorStatistics, measure
from preamp.numerics.records import What
from preamp.optim.fused.entries import entries_of
from preamp.watch.host_copies import HostCopies


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What was found in one tensor, on its way to the host."""

    name: str
    what: What
    form: NumberFormat  # the half format that it is held against
    dtype: torch.dtype
    places: tuple[int, int]  # of the counts and of the extremes among the copies
    scale: int | None = None  # place of the loss scale on the values; ``None`` for 1
    stalled: int | None = None  # place of the number of stalled elements, or ``None``

    def finish(
        self, copies: HostCopies, *, is_skipped: bool, with_histogram: bool
    ) -> TensorStatistics:
        """Turn it into a record. Waits for the copies. Of a skipped step no weight is stalled."""
        counts, extremes = (copies[place] for place in self.places)
        stalled = None if is_skipped or self.stalled is None else int(copies[self.stalled].item())
        return Measured(Tally(counts, extremes), self.dtype).read(
            self.name,
            self.what,
            self.form,
            scale=1.0 if self.scale is None else copies.number(self.scale),
            stalled=stalled,
            with_histogram=with_histogram,
        )


class Meter:
    """Reads tensors, of sharded ones its rank's part, for statistics; does not synchronise.

    It waits for gradients on their way to the host, and copies of those what it needs back.
    """

    def __init__(self, names: ParameterNames, half: torch.dtype | None) -> None:
        """Measure nothing yet; ``half`` is the half dtype of the policy, if it has one."""
        self._names = names
        self._half = torch.float16 if half is None else half

    def gradients(
        self, session: OptimizerSession, copies: HostCopies, scale: torch.Tensor
    ) -> list[Reading]:
        """Measure the dense real gradients of a backward, with the loss ``scale`` on them."""
        place = copies.put(scale.clone())
        found = [(self._names.of(p), p.grad) for p in session.model_params() if p.grad is not None]
        return self.read(found, "gradient", copies, scales=[place] * len(found))

    def stepped_gradients(self, session: OptimizerSession, copies: HostCopies) -> list[Reading]:
        """Measure what a step is going to use, as `gradients`; used up half gradients are none."""
        places: dict[int, int] = {}
        scales: list[int | None] = []
        entries = entries_of(session.params())
        for _, _, _, by, twin in entries.rows():
            # The entry's own factor may clip as well, by zero or nan too.
            factor = None if by is None or twin is None else twin.table.gradients.unscales
            if factor is not None and id(factor) not in places:
                places[id(factor)] = copies.put(factor.reciprocal())
            scales.append(None if factor is None else places[id(factor)])
        pairs = list(zip(map(self._names.of, entries.owners), entries.grads, strict=True))
        return self.read(pairs, "gradient", copies, scales=scales)

    def weights(
        self, session: OptimizerSession, copies: HostCopies, before: dict[int, torch.Tensor]
    ) -> list[Reading]:
        """Measure the weights as they are now; ``before`` is what `before` returned."""
        params = session.model_params()
        stalled = [
            None
            if (earlier := before.get(id(param))) is None
            else copies.put(_count_equal(local_of(param).detach(), earlier))
            for param in params
        ]
        named = [(self._names.of(p), p) for p in params]
        return self.read(named, "weight", copies, stalled=stalled)

    def before(self, session: OptimizerSession) -> dict[int, torch.Tensor]:
        """Copy the half weights ahead of a step, by ``id`` of the parameter.

        The copies are nan where the gradient is zero: equal to nothing later, so no mask is kept.
        """
        found: dict[int, torch.Tensor] = {}
        entries = entries_of(session.params())
        for row, weight in zip(entries.rows(), entries.owners, strict=True):
            given = row[1]
            if _is_plain(given) and is_half(weight):
                own_part = local_of(weight).detach()
                copy = own_part.clone(memory_format=torch.contiguous_format)
                grad = local_of(values_of(given)).detach().reshape(-1).to(copy.device)
                for block, own in zip(blocks_of(copy.view(-1)), blocks_of(grad), strict=True):
                    block.masked_fill_(own == 0, math.nan)
                found[id(weight)] = copy
        return found

    def read(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        what: What,
        copies: HostCopies,
        *,
        scales: Sequence[int | None] = (),
        stalled: Sequence[int | None] = (),
    ) -> list[Reading]:
        """Measure tensors, but for sparse and complex ones and those of whole numbers."""
        places = [place for place, (_, tensor) in enumerate(named) if _is_plain(tensor)]
        tensors = values_in([named[place][1] for place in places])
        found: list[Reading] = []
        for place, tensor, measured in zip(places, tensors, measure(tensors), strict=True):
            half = tensor.dtype if is_half(tensor) else self._half
            reading = Reading(
                name=named[place][0],
                what=what,
                form=FORMATS[dtype_name(half)],
                dtype=tensor.dtype,
                places=(copies.put(measured.tally.counts), copies.put(measured.tally.extremes)),
                scale=scales[place] if scales else None,
                stalled=stalled[place] if stalled else None,
            )
            found.append(reading)
        return found


def _count_equal(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """How many elements are equal; int64 scalar on the tensors' device."""
    count = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for one, two in zip(blocks_of(tensor.reshape(-1)), blocks_of(other.reshape(-1)), strict=True):
        count += (one == two).sum()
    return count


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_floating_point()
