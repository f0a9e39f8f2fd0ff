# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of one step on their way to becoming records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from preamp.engine.session import OptimizerSession
from preamp.numerics import NumericsRecord, Record, StepRecord, TensorStatistics
from preamp.scaling import LossScaler
from preamp.watch.host_copies import HostCopies
from preamp.watch.meter import Reading


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of one backward's gradients, and of the weights after the step."""

    loss_id: int  # whose backward
    readings: list[Reading]  # of the tensors
    copies: HostCopies = field(default_factory=HostCopies)


@dataclass(slots=True, eq=False)
class PendingStep:
    """What is known of a step before ``optimizer.step`` is over."""

    # Scalars, and statistics, by loss id
    losses: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    statistics: dict[int, Statistics] = field(default_factory=dict[int, Statistics])
    norm: torch.Tensor | None = None
    # The half weights before the step; see `Meter.before`
    before: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    has_gradients: bool = False  # whether the latest backward left any

    def call(self, optimizer: torch.optim.Optimizer, scalers: Sequence[LossScaler]) -> FinishedCall:
        """``optimizer.step`` is over: send off what is known. Does not synchronise."""
        copies = HostCopies()
        put = copies.put
        rate: Any = optimizer.param_groups[0].get("lr")
        if isinstance(rate, torch.Tensor) and rate.numel() == 1:
            rate = rate.detach().clone().reshape(())
        elif isinstance(rate, (int, float)):
            rate = torch.tensor(rate, dtype=torch.float64)
        else:  # optimizers may have other ideas of a rate
            rate = None
        return FinishedCall(
            copies=copies,
            statistics=list(self.statistics.values()),
            losses={loss_id: put(loss) for loss_id, loss in self.losses.items()},
            scales={i: put(scaler.scale.clone()) for i, scaler in enumerate(scalers)},
            norm=None if self.norm is None else put(self.norm),
            lr=None if rate is None else put(rate),
        )


@dataclass(slots=True, eq=False)
class FinishedCall:
    """A call of ``optimizer.step`` whose records are still to be made."""

    copies: HostCopies  # the numbers below
    statistics: list[Statistics]
    losses: dict[int, int]  # places of the losses among the copies, by loss id
    scales: dict[int, int]  # places of the loss scales
    norm: int | None  # place of the norm, or ``None``
    lr: int | None  # place of the learning rate, or ``None``
    number: int = 0  # of the step, once its outcome is known
    is_skipped: bool | None = None  # whether it was not taken; ``None`` while that is not known

    def have_come(self, *, late: bool) -> bool:
        """Whether the numbers are there; see `HostCopies.have_come`."""
        return all(copies.have_come(late=late) for copies in self._all_copies())

    def _all_copies(self) -> Iterator[HostCopies]:
        yield self.copies
        for taken in self.statistics:
            yield taken.copies

    def records(self, optimizer: int, *, with_histograms: bool) -> Iterator[Record]:
        """Make the records. Waits for the numbers."""
        number = self.copies.number
        is_skipped = self.is_skipped is True
        yield StepRecord(
            step=self.number,
            losses={loss_id: number(place) for loss_id, place in self.losses.items()},
            scales={loss_id: number(place) for loss_id, place in self.scales.items()},
            skipped=is_skipped,
            norm=None if self.norm is None else number(self.norm),
            lr=None if self.lr is None else number(self.lr),
            optimizer=optimizer,
        )
        found: dict[int, list[TensorStatistics]] = {}
        for taken in self.statistics:
            found.setdefault(taken.loss_id, []).extend(
                reading.finish(taken.copies, is_skipped=is_skipped, with_histogram=with_histograms)
                for reading in taken.readings
            )
        for loss_id, tensors in found.items():
            yield NumericsRecord(
                step=self.number, loss_id=loss_id, tensors=tensors, optimizer=optimizer
            )


@dataclass(slots=True, eq=False)
class Steps:
    """What the recorder knows of one optimizer."""

    index: int  # its place in the engine
    session: OptimizerSession
    pending: PendingStep = field(default_factory=PendingStep)  # the step that is being prepared
    # Steps whose outcome is not known yet, oldest first
    called: deque[FinishedCall] = field(default_factory=deque[FinishedCall])

    @property
    def settled(self) -> int:
        """Steps whose outcome is known."""
        return self.session.steps_applied + self.session.steps_skipped

    @property
    def next_number(self) -> int:
        """Number of the coming step."""
        return self.settled + len(self.called) + 1
