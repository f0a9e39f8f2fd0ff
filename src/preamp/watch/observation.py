# SPDX-License-Identifier: BSD-3-Clause
"""What was seen in one training step: values of tensors, and what each was made from."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, cast

import torch

from preamp.core.program import Call
from preamp.core.pytree import map_leaves
from preamp.core.tensors import node_of, version_of
from preamp.core.torch_private.extremes import extremes, without_modes
from preamp.core.torch_private.operations import Memory, memory_of
from preamp.kernels.vectors import stack
from preamp.numerics import Float32Record

_KEPT = 1 << 16  # calls of modules, as many of their backwards, and readings not put together


@dataclass(frozen=True, slots=True)
class Place:
    """A module."""

    module: str  # qualified name; empty for the model itself
    type: str  # its class; empty for what runs outside of all modules


OUTSIDE = Place("", "")


@dataclass(slots=True, eq=False)
class Reading:
    """Smallest and largest value of one tensor, left on its device, and what has made it."""

    tensor: weakref.ref[torch.Tensor]
    dtype: torch.dtype
    numel: int
    is_leaf: bool  # such as a parameter
    is_parameter: bool  # frozen or not
    # The two numbers, as 0-dim tensors, until `store` has collected them
    parts: tuple[torch.Tensor, torch.Tensor] | None
    moment: int  # by the observation's clock
    is_computed: bool  # whether a function has made it of nothing that was watched
    by: Operation | None = None  # the function that has made it; ``None`` if none was seen
    inside: Pass | None = None  # the call in which it was seen first
    is_made: bool = False  # whether a module has made it, or a function from such values
    is_stale: bool = False  # whether one of the tensors with these values was written to
    _table: _Table | None = None
    _row: int = 0

    def store(self, table: _Table, row: int) -> None:
        """Let the numbers be ``table[row]``."""
        self.parts, self._table, self._row = None, table, row

    def values(self) -> tuple[float, float]:
        """Return the numbers. Synchronises."""
        if self.parts is not None:
            with without_modes():
                return float(self.parts[0]), float(self.parts[1])
        if self._table is None:
            return 0.0, 0.0
        low, high = self._table.numbers[self._row]
        return low, high

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite. Synchronises."""
        return all(map(math.isfinite, self.values()))

    @property
    def has_nan(self) -> bool:
        """Whether any value is nan. Synchronises."""
        low, _ = self.values()  # both are nan, or neither
        return math.isnan(low)

    @property
    def is_minus_infinity(self) -> bool:
        """Whether all that is not finite is minus infinity, and there is some. Synchronises."""
        low, high = self.values()
        return low == -math.inf and high < math.inf

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
        with without_modes():
            return cast("Any", self._rows).tolist()


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """A function of torch that was called."""

    name: str  # empty for changes of a tensor that nobody has told
    # Lines of the program that led to it, the innermost first, up to the forward that called it
    lines: Sequence[Call]
    inputs: Sequence[Reading]
    call: Pass | None  # the module's forward that has called it
    # What the program gave it; ``inputs`` may be casts of that, or what was rounded in the end
    given: Sequence[Reading] = ()
    # Whether a number that is not finite was among the arguments, or no tensor was
    has_constant: bool = False

    @property
    def stack(self) -> list[Call]:
        """All lines of the program that led to it, the innermost first."""
        lines, call = [*self.lines], self.call
        while call is not None:
            lines += call.lines
            call = call.call
        return lines


EARLIER = Operation("", (), (), None)
"""What was made so long ago that nobody remembers from what."""


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
    operation: Operation | None = None  # whose backward it is, if it was seen
    name: str = ""  # of that, else as autograd calls it
    is_cast: bool = False  # whether the backward is of a cast of the model's output
    float32: Float32Record | None = None  # what a forward that went wrong gives in float32
    # Lines of the program that called it, up to the forward around it, and the ``id`` of its frame
    lines: Sequence[Call] = ()
    frame: int = 0


class Values:
    """What is known of tensors: their values, and what they were made from."""

    def __init__(self) -> None:
        """Know nothing."""
        self._clock = 0
        self._count = 0
        self._fresh: list[Reading] = []
        # The latest reading of each tensor that lives, and of the memory that tensors share
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Reading]] = {}
        self._memory: dict[int, tuple[Memory, Reading]] = {}
        self._carried: list[Reading] = []  # those that were there when the step began
        # What functions outside of all modules have made of other values than theirs
        self._computed: dict[int, tuple[weakref.ref[torch.Tensor]]] = {}

    def begin_step(self) -> None:
        """Forget data and weights, and what values were made from two steps ago.

        A hidden state that goes from step to step has all that ever was behind it, and so has one
        of an evaluation from forward to forward.
        """
        for reading in self._carried:
            reading.by = EARLIER
        self._forget()
        self._carried = [
            *(own[2] for own in list(self._known.values())),
            *(own[1] for own in list(self._memory.values())),
        ]

    def _forget(self) -> None:
        """Forget data, weights and memory that is gone."""
        self.collect()
        for key, (_, _, reading) in list(self._known.items()):
            if not reading.is_made:
                self._known.pop(key, None)
        for key, (memory, reading) in list(self._memory.items()):
            if memory.expired() or not reading.is_made:
                self._memory.pop(key, None)
        self._count = 0

    def read(
        self, tensors: Iterable[torch.Tensor], inside: Pass | None = None, *, is_made: bool = False
    ) -> list[Reading]:
        """Read those of ``tensors`` that can be, ``inside`` of a call. Does not synchronise.

        A tensor that goes from one module to the next is read once. ``is_made`` for what a module
        has returned.
        """
        found: list[Reading] = []
        for tensor in tensors:
            reading = self._current(tensor)
            if reading is None and (reading := self._new(tensor)) is not None:
                reading.inside = inside
                earlier = self._sharing(tensor)
                if earlier is not None and earlier.is_made:  # or all batches of a data set are one
                    reading.by = Operation("", (), [earlier], inside, [earlier])
                    reading.is_made = True
            if reading is not None:
                reading.is_made |= is_made
                found.append(reading)
        return found

    def _current(self, tensor: torch.Tensor) -> Reading | None:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor or known[2].is_stale:
            return None
        return known[2] if known[1] == counted_version(tensor) >= 0 else None

    def _sharing(self, tensor: torch.Tensor) -> Reading | None:
        """What was read last of the memory of ``tensor``."""
        memory = memory_of(tensor)
        found = None if memory is None else self._memory.get(memory.cdata)
        return None if found is None else found[1]

    def _new(self, tensor: torch.Tensor, *, shares: bool = True) -> Reading | None:
        parts = extremes(tensor)
        if parts is None:
            return None
        reading = Reading(
            tensor=weakref.ref(tensor),
            dtype=tensor.dtype,
            numel=tensor.numel(),
            is_leaf=tensor.requires_grad and node_of(tensor) is None,
            is_parameter=isinstance(tensor, torch.nn.Parameter),
            parts=parts,
            moment=self.tick(),
            is_computed=self._is_computed(tensor),
        )
        self._keep(tensor, reading, shares=shares)
        self.keep((reading,))
        self._count += 1
        if self._count > _KEPT:
            self.begin_step()
        return reading

    def _keep(self, tensor: torch.Tensor, reading: Reading, *, shares: bool = True) -> None:
        key = id(tensor)
        alive = weakref.ref(tensor, partial(_drop, self._known, key))
        self._known[key] = alive, counted_version(tensor), reading
        memory = memory_of(tensor) if shares else None
        if memory is not None:
            self._memory[memory.cdata] = memory, reading

    def hear(
        self,
        arguments: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        call: Pass | None,
        describe: Callable[[Sequence[Reading]], Operation],
        *,
        moves: bool = False,
        is_between: bool = False,
    ) -> Operation | None:
        """A function has been called, perhaps in a module's forward; return it if it is kept.

        Of what is done to data, outside of all modules, no more is kept than whether it ``moves``
        them only, unless it ``is_between`` a forward and its loss. ``results`` have the arguments
        that it has written to as well; ``describe`` gets what went in.
        """
        old = [self._before(tensor) for tensor in arguments]
        # What moves values may return what it got.
        written: set[int] = set() if moves else set(map(id, results))
        for tensor, one in zip(arguments, old, strict=True):
            is_written = id(tensor) in written and self._current(tensor) is None
            if one is not None and is_written:
                one.is_stale = True  # torch counts no write to `tensor.data` for the tensor
        is_of_data = call is None and not any(one is not None and one.is_made for one in old)
        if is_of_data:
            moves = moves and len({tensor.dtype for tensor in (*arguments, *results)}) == 1
            if not moves or any(map(self._is_computed, arguments)):
                self._note_computed(results if arguments else ())
            if moves or not is_between:
                return None
        inputs: list[Reading] = []
        for tensor, one in zip(arguments, old, strict=True):
            if id(tensor) in written:
                inputs += [one] if one is not None else []
            else:
                inputs += self.read([tensor], call)
        operation = describe(inputs)
        for tensor in results:
            if self._current(tensor) is None and not self._is_view(tensor, arguments):
                # All batches of a data set may be of one memory, of which one has made nothing.
                reading = self._new(tensor, shares=not is_of_data)
                if reading is not None:
                    reading.by, reading.inside, reading.is_made = operation, call, True
        return operation

    def _note_computed(self, results: Sequence[torch.Tensor]) -> None:
        for tensor in results:
            key = id(tensor)
            alive = weakref.ref(tensor, partial(_drop, self._computed, key))
            self._computed[key] = (alive,)

    def _is_computed(self, tensor: torch.Tensor) -> bool:
        known = self._computed.get(id(tensor))
        return known is not None and known[0]() is tensor

    def _before(self, tensor: torch.Tensor) -> Reading | None:
        """What was read last of ``tensor``, even if it was written to since."""
        known = self._known.get(id(tensor))
        return known[2] if known is not None and known[0]() is tensor else self._sharing(tensor)

    def _is_view(self, tensor: torch.Tensor, arguments: Sequence[torch.Tensor]) -> bool:
        """Whether it has the very values of the first argument, which were read."""
        first = arguments[0] if arguments else tensor
        reading = None if first is tensor else self._current(first)
        if reading is None or (reading.dtype, reading.numel) != (tensor.dtype, tensor.numel()):
            return False
        memory, own = memory_of(first), memory_of(tensor)
        if memory is None or own is None or memory.cdata != own.cdata:
            return False
        self._keep(tensor, reading)
        return True

    def keep(self, readings: Iterable[Reading]) -> None:
        """Put the numbers of ``readings`` together as well; see `collect`."""
        self._fresh += readings
        if len(self._fresh) >= _KEPT:
            self.collect()

    def tick(self) -> int:
        """What time it is, and a moment later the next time that one asks."""
        self._clock += 1
        return self._clock

    def collect(self) -> None:
        """Put the numbers read so far together, which takes less memory. Does not synchronise."""
        fresh, self._fresh = self._fresh, []
        groups: dict[tuple[torch.device, torch.dtype], list[Reading]] = {}
        for reading in fresh:
            if reading.parts is not None:
                low = reading.parts[0]
                groups.setdefault((low.device, low.dtype), []).append(reading)
        for readings in groups.values():
            with without_modes():
                rows = stack([n for one in readings for n in one.parts or ()]).reshape(-1, 2)
            table = _Table(rows)
            for row, reading in enumerate(readings):
                reading.store(table, row)


class Observation:
    """The passes of one training step, in the order they ended."""

    def __init__(self, *, follows: bool = False, is_whole: bool = False) -> None:
        """Start without passes."""
        # Whether it began before the graph of the loss, so that no forward was missed
        self.is_whole = is_whole
        # Whether there was no step before that was not watched
        self.follows = follows
        # Whether all functions between forwards were heard as well
        self.hears = True
        self.calls: deque[Pass] = deque(maxlen=_KEPT)
        self.backwards: deque[Pass] = deque(maxlen=_KEPT)
        self.losses: list[tuple[int, Reading]] = []  # and the number of the backward of each

    def add(self, seen: Pass) -> None:
        """Keep a pass."""
        (self.calls if seen.phase == "forward" else self.backwards).append(seen)

    @property
    def is_under_way(self) -> bool:
        """Whether what was seen may be of a step: a forward with gradients, a loss, a backward."""
        return bool(self.backwards or self.losses or self.trained)

    def without_passes(self) -> Observation:
        """Return one of the same step."""
        begun = Observation(follows=self.follows, is_whole=self.is_whole)
        begun.hears = self.hears
        return begun

    @property
    def trained(self) -> list[Pass]:
        """The forwards with gradients that were seen."""
        return [call for call in self.calls if call.has_grad]


def tensors_of(value: Any) -> list[torch.Tensor]:
    """What a module may be handed; `tensors_in` knows no dataclass."""
    found: list[torch.Tensor] = []

    def collect(leaf: torch.Tensor) -> torch.Tensor:
        found.append(leaf)
        return leaf

    map_leaves(collect, value)
    return found


def _drop(known: dict[int, Any], key: int, reference: Any) -> None:
    """A tensor is gone; another one may have its ``id`` by now."""
    if key in known and known[key][0] is reference:
        known.pop(key, None)


def counted_version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; -1 for those that torch does not count for."""
    return -1 if tensor.is_inference() else version_of(tensor)
