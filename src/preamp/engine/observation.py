# SPDX-License-Identifier: BSD-3-Clause
"""What was seen of the modules in one training step, and the first of them to go wrong."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from preamp.core.dtypes import dtype_name
from preamp.kernels.extremes import extremes
from preamp.kernels.vectors import stack
from preamp.numerics import TraceRecord

_KEPT = 1 << 16  # calls of modules, and as many of their backwards, in one step


@dataclass(frozen=True, slots=True)
class Place:
    """A module."""

    module: str  # qualified name; empty for the model itself
    type: str  # its class; empty for what runs outside of all modules


OUTSIDE = Place("", "")


class Reading:
    """Smallest and largest value of one tensor, left on its device."""

    __slots__ = ("_row", "_table", "dtype", "is_activation", "parts")

    def __init__(self, tensor: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep ``parts`` of ``tensor``, not the tensor."""
        self.dtype = tensor.dtype
        self.is_activation = tensor.requires_grad  # whether gradients flow to it
        # The two numbers, as 0-dim tensors, until `store` has collected them
        self.parts: tuple[torch.Tensor, torch.Tensor] | None = parts
        self._table: torch.Tensor | None = None
        self._row = 0

    def store(self, table: torch.Tensor, row: int) -> None:
        """Let the numbers be ``table[row]``."""
        self.parts, self._table, self._row = None, table, row

    def values(self, tables: dict[int, list[list[float]]]) -> tuple[float, float]:
        """Return the numbers; ``tables`` has those read so far, by ``id``. Synchronises."""
        if self._table is None:
            return 0.0, 0.0
        if id(self._table) not in tables:
            tables[id(self._table)] = cast("Any", self._table).tolist()
        low, high = tables[id(self._table)][self._row]
        return low, high


def read(tensors: Iterable[torch.Tensor]) -> list[Reading]:
    """Read those of ``tensors`` that can be. Does not synchronise."""
    found = ((tensor, extremes(tensor)) for tensor in tensors)
    return [Reading(tensor, parts) for tensor, parts in found if parts is not None]


@dataclass(frozen=True, slots=True, eq=False)
class Pass:
    """One call of a module, or the backward of one of its operations."""

    place: Place
    phase: Literal["forward", "backward"]
    inputs: Sequence[Reading]  # what went in: arguments, or gradients of the output
    outputs: Sequence[Reading]  # what came out: results, or gradients of arguments and parameters
    backward: int = 0  # number of the backward; 0 for a call


@dataclass(frozen=True, slots=True)
class Finding:
    """What the watching of one step has come to."""

    was_watched: bool  # whether the whole step was watched, or the forward of any module
    # Whether no module's forward could be seen, as where the whole model is compiled
    is_blind: bool = False
    trace: TraceRecord | None = None  # the first module to go wrong, if it was found


class Observation:
    """The passes of one training step, in the order they ended."""

    def __init__(self, *, is_whole: bool = False) -> None:
        """Start without passes."""
        # Whether it began with the step, so that no forward can have come before it
        self.is_whole = is_whole
        # Whether the loss comes from code that ``torch.compile`` has made
        self.has_compiled = False
        self._calls: deque[Pass] = deque(maxlen=_KEPT)
        self._backwards: deque[Pass] = deque(maxlen=_KEPT)
        self._fresh: list[Reading] = []

    def add(self, seen: Pass) -> None:
        """Keep a pass."""
        (self._calls if seen.phase == "forward" else self._backwards).append(seen)
        self._fresh += (*seen.inputs, *seen.outputs)
        if len(self._fresh) >= _KEPT:
            self.collect()

    def collect(self) -> None:
        """Put the numbers read so far together, which takes less memory. Does not synchronise."""
        fresh, self._fresh = self._fresh, []
        groups: dict[tuple[torch.device, torch.dtype], list[Reading]] = {}
        for reading in fresh:
            if reading.parts is not None:
                low = reading.parts[0]
                groups.setdefault((low.device, low.dtype), []).append(reading)
        for readings in groups.values():
            numbers = [number for reading in readings for number in reading.parts or ()]
            table = stack(numbers).reshape(-1, 2)
            for row, reading in enumerate(readings):
                reading.store(table, row)

    def find(self, backward: int, loss_was_finite: bool) -> Finding:
        """Look for the first module to turn finite values into infinite ones or nan. Synchronises.

        Forwards come first, in the order they ended, so that a module comes before those it is in;
        then the given backward. Outputs that are only minus infinity, as of masks, count last if
        the loss was finite.
        """
        self.collect()
        tables: dict[int, list[list[float]]] = {}
        calls = [_Judged(seen, tables) for seen in self._calls]
        mine = (seen for seen in self._backwards if seen.backward == backward)
        wrong = [call for call in calls if call.goes_wrong]
        came_in = not wrong and any(call.has_bad_input for call in calls)
        masks = [call for call in wrong if loss_was_finite and call.is_mask]
        wrong = [call for call in wrong if call not in masks]
        wrong += [judged for judged in (_Judged(s, tables) for s in mine) if judged.goes_wrong]
        first = next(iter((*wrong, *masks)), None)
        is_blind = not calls and (self.is_whole or self.has_compiled)
        if (is_blind or came_in) and not loss_was_finite:
            first = None  # it came from a forward, and the backward only shows what it led to
        return Finding(
            was_watched=bool(calls) or self.is_whole,
            is_blind=is_blind,
            trace=None if first is None else first.record(),
        )


class _Judged:
    """A pass with its numbers on the host."""

    def __init__(self, seen: Pass, tables: dict[int, list[list[float]]]) -> None:
        self._seen = seen
        self._inputs = [(one, *one.values(tables)) for one in seen.inputs]
        self._outputs = [(one, *one.values(tables)) for one in seen.outputs]

    @property
    def has_bad_input(self) -> bool:
        """Whether infinite values or nan went in, other than masks."""
        return any(
            not _is_finite(low, high) and not (_is_mask(low, high) and not one.is_activation)
            for one, low, high in self._inputs
        )

    @property
    def goes_wrong(self) -> bool:
        """Whether finite values went in, and others came out."""
        comes_out = any(not _is_finite(low, high) for _, low, high in self._outputs)
        return comes_out and not self.has_bad_input

    @property
    def is_mask(self) -> bool:
        """Whether all that is not finite in the outputs is minus infinity."""
        return all(_is_finite(low, high) or _is_mask(low, high) for _, low, high in self._outputs)

    def record(self) -> TraceRecord:
        """Return it in words."""
        bad = [(o, low, high) for o, low, high in self._outputs if not _is_finite(low, high)]
        one, low, _ = bad[0]
        finite = [max(-low, high) for _, low, high in self._inputs if _is_finite(low, high)]
        return TraceRecord(
            module=self._seen.place.module,
            type=self._seen.place.type,
            phase=self._seen.phase,
            input_max_abs=max(finite, default=0.0),
            output_found="nan" if math.isnan(low) else "inf",
            dtype=dtype_name(one.dtype),
        )


def _is_finite(low: float, high: float) -> bool:
    return math.isfinite(low) and math.isfinite(high)


def _is_mask(low: float, high: float) -> bool:
    return low == -math.inf and high < math.inf
