# SPDX-License-Identifier: BSD-3-Clause
"""What was seen of the modules in one training step, and the first of them to go wrong."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, Literal, cast

import torch

from preamp.core.dtypes import dtype_name
from preamp.core.program import Line, shown
from preamp.kernels.extremes import extremes
from preamp.kernels.operations import version_of
from preamp.kernels.vectors import stack
from preamp.numerics import FrameRecord, TraceRecord

_KEPT = 1 << 16  # calls of modules, and as many of their backwards, in one step
_RECENT = 64  # tensors that may be handed on
_FRAMES = 8  # passes that are told before the one that went wrong


@dataclass(frozen=True, slots=True)
class Place:
    """A module."""

    module: str  # qualified name; empty for the model itself
    type: str  # its class; empty for what runs outside of all modules


OUTSIDE = Place("", "")


class Reading:
    """Smallest and largest value of one tensor, left on its device."""

    __slots__ = ("_row", "_table", "dtype", "is_activation", "parts", "storage")

    def __init__(self, tensor: torch.Tensor, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keep ``parts`` of ``tensor``, not the tensor."""
        self.dtype = tensor.dtype
        # Address of its memory, by which to tell copies from what is just alike
        self.storage = 0 if tensor.layout is not torch.strided else tensor.data_ptr()
        self.is_activation = tensor.requires_grad  # whether gradients flow to it
        # The two numbers, as 0-dim tensors, until `store` has collected them
        self.parts: tuple[torch.Tensor, torch.Tensor] | None = parts
        self._table: _Table | None = None
        self._row = 0

    def store(self, table: _Table, row: int) -> None:
        """Let the numbers be ``table[row]``."""
        self.parts, self._table, self._row = None, table, row

    def values(self) -> tuple[float, float]:
        """Return the numbers, once they were collected. Synchronises."""
        if self._table is None:
            return 0.0, 0.0
        low, high = self._table.numbers[self._row]
        return low, high

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite. Synchronises."""
        return all(map(math.isfinite, self.values()))

    @property
    def max_abs(self) -> float:
        """Largest magnitude. Synchronises."""
        return max(map(abs, self.values()))


class _Table:
    """Numbers of many tensors, read from their device once."""

    def __init__(self, rows: torch.Tensor) -> None:
        self._rows = rows

    @cached_property
    def numbers(self) -> list[list[float]]:
        return cast("Any", self._rows).tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A function of torch that a module has called."""

    name: str
    line: Line | None  # of the program
    inputs: Sequence[Reading]  # those arguments that were read before
    outputs: Sequence[Reading]
    moment: int  # by the observation's clock


@dataclass(slots=True, eq=False)
class Pass:
    """One call of a module, or the backward of one of its operations."""

    place: Place
    phase: Literal["forward", "backward"]
    inputs: Sequence[Reading] = ()  # what went in: arguments, or gradients of the output
    outputs: Sequence[Reading] = ()  # what came out: results, or gradients of what went in
    backward: int = 0  # number of the backward, or of the one that comes after a call
    given: Sequence[Reading] | None = None  # the arguments before they were cast, if they were
    made: Sequence[Reading] | None = None  # the results before they were cast, if they were
    call: Pass | None = None  # that a call was made in, or that the operation belongs to
    has_grad: bool = True  # whether a call was made with gradients
    began: int = 0  # by the observation's clock
    ended: int = 0
    operations: list[Operation] = field(default_factory=list[Operation])
    operation: str = ""  # of a backward, as autograd calls it
    line: Line | None = None  # where the operation was called
    is_cast: bool = False  # whether the backward is of a cast of the model's output


@dataclass(frozen=True, slots=True)
class Finding:
    """What the watching of one step has come to."""

    was_watched: bool  # whether the whole step was watched, or the forward of any module
    # Whether no module's forward could be seen, as where the whole model is compiled
    is_blind: bool = False
    trace: TraceRecord | None = None  # the first to go wrong, if it was found


class Observation:
    """The passes of one training step, in the order they ended."""

    def __init__(self, *, is_whole: bool = False) -> None:
        """Start without passes."""
        # Whether it began with the step, so that no forward can have come before it
        self.is_whole = is_whole
        # Whether the loss comes from code that ``torch.compile`` has made
        self.has_compiled = False
        self.clock = 0
        self._recent: dict[int, tuple[weakref.ref[torch.Tensor], int, Reading]] = {}
        self._calls: deque[Pass] = deque(maxlen=_KEPT)
        self._backwards: deque[Pass] = deque(maxlen=_KEPT)
        self._fresh: list[Reading] = []

    def read(self, tensors: Iterable[torch.Tensor]) -> list[Reading]:
        """Read those of ``tensors`` that can be. Does not synchronise.

        A tensor that goes from one module to the next is read once.
        """
        found: list[Reading] = []
        for tensor in tensors:
            version = version_of(tensor)
            known = self._recent.get(id(tensor))
            if known is not None and known[0]() is tensor and known[1] == version >= 0:
                found.append(known[2])
            elif (parts := extremes(tensor)) is not None:
                found.append(reading := Reading(tensor, parts))
                self._recent[id(tensor)] = weakref.ref(tensor), version, reading
        if len(self._recent) > _RECENT:  # other threads may be adding
            self._recent = dict(list(self._recent.items())[-_RECENT // 2 :])
        return found

    def known(self, tensors: Iterable[torch.Tensor]) -> list[Reading]:
        """What was read of ``tensors`` lately; none of them is read."""
        found = ((tensor, self._recent.get(id(tensor))) for tensor in tensors)
        return [entry[2] for tensor, entry in found if entry and entry[0]() is tensor]

    def keep(self, readings: Iterable[Reading]) -> None:
        """Put the numbers of ``readings`` together as well; see `collect`."""
        self._fresh += readings
        if len(self._fresh) >= _KEPT:
            self.collect()

    def tick(self) -> int:
        """What time it is, and a moment later the next time that one asks."""
        self.clock += 1
        return self.clock

    def add(self, seen: Pass) -> None:
        """Keep a pass."""
        seen.ended = self.tick()
        (self._calls if seen.phase == "forward" else self._backwards).append(seen)
        of_operations = (reading for one in seen.operations for reading in one.outputs)
        more = chain(seen.given or (), seen.made or (), of_operations)
        self.keep((*seen.inputs, *seen.outputs, *more))

    def collect(self) -> None:
        """Put the numbers read so far together, which takes less memory. Does not synchronise."""
        fresh, self._fresh = self._fresh, []
        groups: dict[tuple[torch.device, torch.dtype], list[Reading]] = {}
        for reading in fresh:
            if reading.parts is not None:
                low = reading.parts[0]
                groups.setdefault((low.device, low.dtype), []).append(reading)
        for readings in groups.values():
            own = list({id(reading): reading for reading in readings}.values())
            table = _Table(stack([n for one in own for n in one.parts or ()]).reshape(-1, 2))
            for row, reading in enumerate(own):
                reading.store(table, row)

    @property
    def has_calls(self) -> bool:
        """Whether a forward with gradients was seen."""
        return any(call.has_grad for call in self._calls)

    def ends_finite(self) -> bool:
        """Whether no forward has left infinite values or nan. Synchronises."""
        self.collect()
        return _Story([_Judged(seen) for seen in self._calls]).origin is None

    def find(
        self,
        backward: int,
        loss_was_finite: bool,
        weights_of: Callable[[Place], list[Reading]] | None = None,
    ) -> Finding:
        """Look for what first turned finite values into infinite ones or nan. Synchronises.

        If the loss was not finite, it was a forward, the data, or the loss function; what a later
        forward has made finite again does not count. If it was finite, it was a backward; only
        where the forward that belongs to it had such values already, what they came from.
        """
        self.collect()
        calls = [_Judged(seen) for seen in self._calls if seen.backward <= backward]
        trained = [call for call in self._calls if call.has_grad]
        mine = (_Judged(seen) for seen in self._backwards if seen.backward == backward)
        wrong = [judged for judged in mine if judged.goes_wrong]
        is_blind = not trained and (self.is_whole or self.has_compiled)
        story = _Story(calls)
        if loss_was_finite:
            origin = _in_a_backward(wrong, story)
        elif is_blind:
            origin = None  # it came from a forward, and the backward only shows what it led to
        else:
            origin = story.origin or (_backward(wrong[0]) if wrong else None)
        trace = None
        if origin is not None and origin.is_known:
            trace = origin.record(self._frames_before(origin.moment, weights_of))
        return Finding(bool(trained) or self.is_whole, is_blind, trace)

    def _frames_before(
        self, moment: int, weights_of: Callable[[Place], list[Reading]] | None
    ) -> list[FrameRecord]:
        seen = sorted((*self._calls, *self._backwards), key=lambda one: one.ended)
        frames: list[FrameRecord] = []
        for one in [one for one in seen if one.ended < moment][-_FRAMES:]:
            weights: Sequence[Reading] = ()
            if weights_of is not None and one.phase == "forward":
                weights = weights_of(one.place)
            frames.append(
                FrameRecord(
                    module=one.place.module,
                    type=one.place.type,
                    phase=one.phase,
                    inputs=[[*reading.values()] for reading in one.inputs],
                    outputs=[[*reading.values()] for reading in one.outputs],
                    weights=[[*reading.values()] for reading in weights],
                )
            )
        return frames


class _Judged:
    """A pass with its numbers on the host."""

    def __init__(self, seen: Pass) -> None:
        self.seen = seen
        self.bad_inputs = _bad(seen.inputs)
        # A mask goes with something that it masks.
        masks = [one for one in self.bad_inputs if not one.is_activation and _is_mask(one)]
        if seen.phase == "forward" and len(masks) < len(seen.inputs):
            self.bad_inputs = [one for one in self.bad_inputs if one not in masks]
        self.bad_outputs = _bad(seen.outputs)

    @property
    def goes_wrong(self) -> bool:
        """Whether finite values went in, and others came out."""
        return bool(self.bad_outputs) and not self.bad_inputs

    @property
    def is_tainted(self) -> bool:
        """Whether a forward had values that are not finite, but for masks."""
        return any(not _is_mask(one) for one in (*self.bad_inputs, *self.bad_outputs))


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """Where values became infinite or nan."""

    seen: Pass
    phase: Literal["forward", "backward", "data", "input cast", "output cast"]
    bad: Sequence[Reading]  # what did
    moment: int  # when, by the observation's clock
    is_known: bool = True  # whether it was nothing else

    def record(self, frames: list[FrameRecord]) -> TraceRecord:
        """Return it in words."""
        seen, phase, bad = self.seen, self.phase, self.bad[0]
        operation, line, inputs = seen.operation, seen.line, seen.inputs
        if phase == "forward" and (first := _first_bad(seen)) is not None:
            operation, line, bad = first.name, first.line, _bad(first.outputs)[0]
        if phase == "input cast":
            inputs = seen.given or inputs
        elif phase == "output cast":
            inputs = seen.made or inputs
        return TraceRecord(
            module=seen.place.module,
            type=seen.place.type,
            phase="output cast backward" if seen.is_cast else phase,
            input_max_abs=max([one.max_abs for one in inputs if one.is_finite], default=0.0),
            output_found="nan" if math.isnan(bad.values()[0]) else "inf",
            dtype=dtype_name(bad.dtype),
            operation=operation,
            where="" if line is None else shown(line),
            frames=frames,
        )


def _in_a_backward(wrong: Sequence[_Judged], story: _Story) -> _Origin | None:
    """The first backward to go wrong, or what was wrong in the forward that it belongs to."""
    for judged in wrong:
        if story.taint_of(judged.seen.call) is None:
            return _backward(judged)
    if not wrong:
        return None  # in the forward there may be what the script expects, such as masks
    origin = story.taint_of(wrong[0].seen.call)
    if origin is None or (origin.seen is wrong[0].seen.call and origin.phase == "forward"):
        return _backward(wrong[0])
    return origin


def _backward(judged: _Judged) -> _Origin:
    return _Origin(judged.seen, "backward", judged.bad_outputs, judged.seen.ended)


class _Story:
    """The forwards of a step in time: where values became infinite or nan, and finite again."""

    def __init__(self, calls: Sequence[_Judged]) -> None:
        """Go through ``calls``, those without gradients included."""
        self._judged = {call.seen: call for call in calls}
        self._taints: dict[Pass, _Origin] = {}
        self._frozen: list[Pass] = []  # calls without gradients that others may go on from
        frozen = self._go_through([call for call in calls if not call.seen.has_grad])
        self._frozen += [c.seen for c in calls if not c.seen.has_grad and c.bad_outputs]
        trained = self._go_through([call for call in calls if call.seen.has_grad])
        # What was never made finite again. A teacher's output, which nobody trains, goes into a
        # loss as well.
        self.origin = trained or frozen

    def taint_of(self, call: Pass | None) -> _Origin | None:
        """What was wrong already when ``call`` ran, or behind all calls; masks do not count."""
        origin = self.origin if call is None else self._taints.get(call)
        if origin is None or not self._judged[call or origin.seen].is_tainted:
            return None
        return origin

    def _go_through(self, calls: Sequence[_Judged]) -> _Origin | None:
        """Return what was not made finite again by a later call."""
        moments: list[tuple[int, _Judged, Operation | bool]] = []
        for call in calls:
            moments += [(call.seen.began, call, True), (call.seen.ended, call, False)]
            moments += [(one.moment, call, one) for one in call.seen.operations if one.inputs]
        origin: _Origin | None = None
        handled: _Origin | None = None
        for _, call, what in sorted(moments, key=lambda moment: moment[0]):
            if isinstance(what, Operation):
                makes_finite = what.outputs and _bad(what.inputs) and not _bad(what.outputs)
            elif call.bad_inputs if what else call.bad_outputs:
                if origin is None:
                    origin = self._came_in(call, handled) if what else self._made(call, handled)
                self._taints.setdefault(call.seen, origin)
                continue
            else:
                is_in = origin is not None and origin.moment >= call.seen.began
                makes_finite = not what and call.seen.outputs and (call.bad_inputs or is_in)
            if makes_finite and origin is not None:
                origin, handled = None, origin
        return origin

    def _made(self, call: _Judged, handled: _Origin | None) -> _Origin:
        """A call has made them from finite values."""
        seen, bad = call.seen, call.bad_outputs
        if handled is not None and handled.moment >= seen.began:
            later = (one for one in seen.operations if one.moment > handled.moment)
            if not any(_bad(one.outputs) and not _bad(one.inputs) for one in later):
                return handled  # a part of it was never made finite
        if seen.made is not None and not _bad(seen.made):
            return _Origin(seen, "output cast", bad, seen.ended)
        first = _first_bad(seen)
        if first is not None and first is seen.operations[0]:
            # Where functions are cast one by one, what they are given may be too large for that.
            limit = torch.finfo(_bad(first.outputs)[0].dtype).max
            if any(one.is_finite and one.max_abs > limit for one in seen.inputs):
                return _Origin(seen, "input cast", _bad(first.outputs), seen.ended)
        return _Origin(seen, "forward", bad, seen.ended)

    def _came_in(self, call: _Judged, handled: _Origin | None) -> _Origin:
        """They went into a call, and none before it has left any."""
        seen, bad, parent = call.seen, call.bad_inputs, call.seen.call
        if seen.given is not None and not _bad(seen.given):
            return _Origin(seen, "input cast", bad, seen.began)
        if parent is not None:
            if parent in self._taints:
                return self._taints[parent]
            if handled is not None and handled.moment >= parent.began:
                return handled  # by another way than the one on which they became finite
            return _Origin(parent, "forward", bad, seen.began)
        for frozen in self._frozen:
            given = _bad(seen.given or seen.inputs)
            if any(_are_linked(out, one) for out in frozen.outputs for one in given):
                return self._taints[frozen]
        # What they come from may have been changed on the way here, so that it is not recognised.
        others = [self._taints[frozen].phase for frozen in self._frozen]
        is_known = all(phase in ("data", "input cast") for phase in others)
        return _Origin(seen, "data", bad, seen.began, is_known=is_known)


def _first_bad(seen: Pass) -> Operation | None:
    """The first function whose result was not finite, nor made so by a later one, as masks are."""
    first: Operation | None = None
    for one in seen.operations:
        if _bad(one.outputs):
            first = first or one
        elif one.outputs and _bad(one.inputs):
            first = None
    return first


def _bad(readings: Sequence[Reading]) -> list[Reading]:
    return [one for one in readings if not one.is_finite]


def _are_linked(output: Reading, argument: Reading) -> bool:
    """Whether they are one tensor, or copies of it."""
    (low, high), others = output.values(), argument.values()
    if math.isnan(low) or (math.isinf(low) and math.isinf(high)):
        is_same = output.storage == argument.storage != 0
        return is_same and (math.isnan(low) == math.isnan(others[0]))
    return (low, high) == others


def _is_mask(reading: Reading) -> bool:
    """Whether all that is not finite is minus infinity."""
    low, high = reading.values()
    return low == -math.inf and high < math.inf
