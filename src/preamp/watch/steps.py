# SPDX-License-Identifier: BSD-3-Clause
"""The numbers of one step on their way to becoming records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from preamp.engine.session import OptimizerSession
from preamp.numerics import (
    FrameRecord,
    FramesRecord,
    MemoryRecord,
    NumericsRecord,
    Record,
    StepRecord,
    TensorStatistics,
)
from preamp.numerics.statistics import add_up
from preamp.scaling import LossScaler
from preamp.watch.host_copies import HostCopies
from preamp.watch.meter import Reading


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Statistics of one backward's gradients, of the weights after the step, of activations."""

    loss_id: int  # whose backward
    readings: list[Reading]  # of the tensors
    copies: HostCopies = field(default_factory=HostCopies)


Extremes = tuple[torch.Tensor, torch.Tensor]  # smallest and largest value, 0-dim


class Frames:
    """Smallest and largest values of what went through modules, on their way to the host."""

    def __init__(self) -> None:
        """Start without any."""
        self.copies = HostCopies()
        # Module and class; of its inputs, outputs and weights the places among the copies
        self._found: list[tuple[str, str, list[list[int]]]] = []

    def add(self, module: str, kind: str, found: Iterable[Sequence[Extremes]]) -> None:
        """A forward has ended, with these inputs, outputs and weights. Does not synchronise."""
        places = [[self.copies.put(torch.stack(parts)) for parts in row] for row in found]
        self._found.append((module, kind, places))

    def records(self, step: int, optimizer: int) -> Iterator[Record]:
        """Make the record of a step, if anything was read. Waits for the numbers."""
        if not self._found:
            return
        frames: list[FrameRecord] = []
        for module, kind, places in self._found:
            inputs, outputs, weights = (
                [cast("Any", self.copies[place]).tolist() for place in row] for row in places
            )
            frames.append(
                FrameRecord(
                    module=module,
                    type=kind,
                    phase="forward",
                    inputs=inputs,
                    outputs=outputs,
                    weights=weights,
                )
            )
        yield FramesRecord(step=step, frames=frames, optimizer=optimizer)


@dataclass(slots=True, eq=False)
class PendingStep:
    """What is known of a step before ``optimizer.step`` is over."""

    # Scalars, and statistics, by loss id
    losses: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    statistics: dict[int, Statistics] = field(default_factory=dict[int, Statistics])
    norm: torch.Tensor | None = None
    # The half weights before the step; see `Meter.before`
    before: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    memory: MemoryRecord | None = None  # what was held before the step, or ``None``
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
    frames: Frames = field(default_factory=Frames)
    number: int = 0  # of the step, once its outcome is known
    is_skipped: bool | None = None  # whether it was not taken; ``None`` while that is not known

    def have_come(self, *, late: bool) -> bool:
        """Whether the numbers are there; see `HostCopies.have_come`."""
        return all(copies.have_come(late=late) for copies in self._all_copies())

    def _all_copies(self) -> Iterator[HostCopies]:
        yield self.copies
        yield self.frames.copies
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
        yield from self.frames.records(self.number, optimizer)
        found: dict[int, list[TensorStatistics]] = {}
        for taken in self.statistics:
            found.setdefault(taken.loss_id, []).extend(
                reading.finish(taken.copies, is_skipped=is_skipped, with_histogram=with_histograms)
                for reading in taken.readings
            )
        for loss_id, tensors in found.items():
            yield NumericsRecord(
                step=self.number, loss_id=loss_id, tensors=add_up(tensors), optimizer=optimizer
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
