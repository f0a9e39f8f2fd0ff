# SPDX-License-Identifier: BSD-3-Clause
"""Where the values of a watched step became infinite or nan: back from the loss to the first."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from preamp.core.dtypes import dtype_name
from preamp.core.program import shown, stack_of
from preamp.numerics import FrameRecord, TraceRecord
from preamp.numerics.records import Phase
from preamp.watch.observation import EARLIER, OUTSIDE, Observation, Operation, Pass, Place, Reading

_SOFTMAX = ("softmax", "log_softmax", "scaled_dot_product_attention")
_FRAMES = 8  # passes that are told before the one that went wrong

WeightsOf = Callable[[Place], list[Reading]]
NameOf = Callable[[torch.Tensor | None], str]


class _NotKnownError(Exception):
    """What a value was made from was not seen."""


@dataclass(frozen=True, slots=True, eq=False)
class _Origin:
    """Where values became infinite or nan."""

    seen: Pass
    phase: Phase
    bad: Reading  # what did
    moment: int  # when, by the observation's clock
    inputs: Sequence[Reading]
    by: Operation | None = None  # the function, if it is not the one that made `bad`

    def record(self, frames: list[FrameRecord], name_of: NameOf) -> TraceRecord:
        """Return it in words."""
        by = self.by or self.bad.by
        calls = [] if by is None else by.stack
        return TraceRecord(
            module=self.seen.place.module,
            type=self.seen.place.type,
            phase="output cast backward" if self.seen.is_cast else self.phase,
            input_max_abs=_largest(self.inputs),
            output_found="nan" if self.bad.has_nan else "inf",
            dtype=dtype_name(self.bad.dtype),
            operation=self.seen.name if by is None else by.name,
            where=shown(calls[0][:2]) if calls else "",
            stack=stack_of(calls),
            frames=frames,
            operation_max_abs=None if by is None else _largest(by.given),
            operation_min=None if by is None else _smallest(by.given),
            float32=self.seen.float32 if self.phase == "forward" else None,
            held=name_of(self.bad.tensor()) if self.bad.by is None else "",
        )


def _largest(readings: Iterable[Reading]) -> float | None:
    """The largest magnitude of those that are finite."""
    return max((one.max_abs for one in readings if one.is_finite), default=None)


def _smallest(readings: Iterable[Reading]) -> float | None:
    """The smallest value of those that are finite."""
    return min((one.values()[0] for one in readings if one.is_finite), default=None)


def find(
    step: Observation, backward: int, loss_was_finite: bool, weights_of: WeightsOf, name_of: NameOf
) -> TraceRecord | None:
    """Look for what first turned finite values into infinite ones or nan. Synchronises.

    If the loss was not finite, it is what the loss was made from; what was made finite again on
    the way is not. If it was finite, it was a backward; only where its own forward was given such
    values already, what those were made from.

    Returns it, or ``None`` where that is not known.
    """
    wrong = [one for one in step.backwards if one.backward == backward and _goes_wrong(one)]
    losses = [one for number, one in step.losses if number <= backward and not one.is_finite]
    search = Search(step)
    origin: _Origin | None = None
    try:
        if loss_was_finite:
            origin = search.of_backwards(wrong)
        elif losses:
            origin = search.of(losses[0])
    except _NotKnownError:
        pass
    if origin is None:
        return None
    return origin.record(_frames(step, origin.moment, weights_of), name_of)


def _frames(step: Observation, moment: int, weights_of: WeightsOf) -> list[FrameRecord]:
    before = [one for one in (*step.calls, *step.backwards) if one.ended < moment]
    return [
        FrameRecord(
            module=one.place.module,
            type=one.place.type,
            phase=one.phase,
            inputs=[[*reading.values()] for reading in one.inputs],
            outputs=[[*reading.values()] for reading in one.outputs],
            weights=[
                [*reading.values()]
                for reading in (weights_of(one.place) if one.phase == "forward" else ())
            ],
        )
        for one in sorted(before, key=lambda one: one.ended)[-_FRAMES:]
    ]


def _goes_wrong(seen: Pass) -> bool:
    """Whether finite values went in, and others came out."""
    return all(one.is_finite for one in seen.inputs) and not all(
        one.is_finite for one in seen.outputs
    )


class Search:
    """The way back from values to what they were made from."""

    def __init__(self, step: Observation) -> None:
        """Go by what was seen in ``step``."""
        self._step = step
        self._inside: dict[Pass | None, list[Pass]] = {}
        for call in step.calls:
            self._inside.setdefault(call.call, []).append(call)
        self._calls = set(step.calls)
        self._losses = {one for _, one in step.losses}
        self._masks: dict[Reading, bool] = {}
        self._firsts: dict[Reading, Reading] = {}
        self._takers: dict[Reading, Operation] = {}  # the function that was given it first

    def of_backwards(self, wrong: Sequence[Pass]) -> _Origin | None:
        """The first backward to go wrong, or what was wrong with what its forward was given."""
        for seen in wrong:
            if self._taint(seen) is None:
                return _cast(seen) or self._backward(seen)
        return self._taint(wrong[0]) if wrong else None

    def _backward(self, seen: Pass) -> _Origin:
        """That it is a backward's; one that runs wide was given what its first pass was."""
        bad, by = _bad_output(seen), seen.operation
        first = seen
        if by is not None and by.given is not by.inputs:
            own = (one for one in self._step.backwards if one.backward == seen.backward)
            of_call = (one for one in own if one.operation and one.operation.given == by.given)
            first = next(of_call, seen)
        return _Origin(seen, "backward", bad, seen.ended, first.inputs, by)

    def _taint(self, seen: Pass) -> _Origin | None:
        """What was wrong already when the forward ran that a backward belongs to."""
        if seen.operation is not None:
            given = seen.operation.inputs
        else:
            call = seen.call
            given = () if call is None else (*(call.given or ()), *call.inputs, *call.outputs)
        bad = next((one for one in given if self._is_bad(one)), None)
        if bad is None:
            return None
        origin = self.of(bad)
        # A module's own outputs are among these; what a function was given was there before it.
        is_own = seen.operation is None and origin.seen is seen.call and origin.phase == "forward"
        return None if is_own and origin.bad.by is not None else origin

    # -- forwards --------------------------------------------------------------------------------

    def of(self, reading: Reading) -> _Origin:
        """Where ``reading``, which is not finite, comes from."""
        first = self._first(reading)
        call = first.inside if first.by is None else first.by.call
        if call is None:
            if first.by is None and first not in self._losses:
                return self._data(first)
            inputs = () if first.by is None else first.by.inputs
            return _Origin(Pass(OUTSIDE, "forward"), "forward", first, first.moment, inputs)
        ends = first in call.outputs and call.made is not None and first not in call.made
        if ends:
            return _Origin(call, "output cast", first, first.moment, call.made or ())
        given = call.inputs if call.given is None else call.given
        begins = call.given is not None and first in call.inputs
        if first.by is not None:
            # Where functions are cast one by one, they may be given what is too large for that.
            limit = torch.finfo(first.dtype).max
            begins |= any(one in given and one.max_abs > limit for one in first.by.inputs)
        if begins:
            return _Origin(call, "input cast", first, first.moment, given)
        return _Origin(call, "forward", first, first.moment, call.inputs)

    def _data(self, reading: Reading) -> _Origin:
        """Nothing that was watched has made it."""
        # Data would be blamed for what another model has made, and nobody was seen to change.
        left = [one for call in self._inside.get(None, ()) for one in call.outputs]
        roots = [self._first(one) for one in left if self._is_bad(one)]
        if any(one.by is not None or one.inside is not None for one in roots):
            raise _NotKnownError
        takers = [c for c in self._step.calls if reading in (*(c.given or ()), *c.inputs)]
        seen = min(takers, key=lambda one: one.began, default=Pass(OUTSIDE, "forward"))
        is_heard = self._step.follows and self._step.hears
        phase: Phase = "data" if takers and is_heard and not reading.is_computed else "given"
        if reading.is_parameter:
            phase = "weight"
        taker = None if takers or reading.is_parameter else self._takers.get(reading)
        inputs = seen.given or seen.inputs
        return _Origin(seen, phase, reading, reading.moment, inputs, taker)

    def _first(self, start: Reading) -> Reading:
        """The earliest of what ``start`` was made from that was not finite, and had no other."""
        if start in self._firsts:
            return self._firsts[start]
        found: list[Reading] = []
        seen, pending = {start}, [start]
        while pending:
            reading = pending.pop()
            sources = self._sources(reading)
            bad = [one for one in sources if self._is_bad(one)]
            if not bad and reading is start and self._is_mask(reading):
                bad = [one for one in sources if not one.is_finite]
            if not bad:
                found.append(reading)
            pending += [one for one in bad if one not in seen]
            seen.update(bad)
            if reading.by is not None:
                self._takers |= {one: reading.by for one in bad}
        self._firsts[start] = min(_without_masks(found), key=lambda one: one.moment)
        return self._firsts[start]

    def _sources(self, reading: Reading) -> Sequence[Reading]:
        """What a reading was made from, or, where no function was heard, may have been."""
        if reading.by is EARLIER:
            raise _NotKnownError
        if reading.by is not None:
            return () if self._hides_all(reading.by) else reading.by.inputs
        call = reading.inside
        if call is not None and call.made is not None:
            if reading in call.outputs and reading not in call.made:
                return call.made
        is_weight = reading.is_leaf or reading.is_parameter
        if is_weight or (call is None and self._step.hears and reading not in self._losses):
            return ()
        if call is not None and call not in self._calls:
            raise _NotKnownError  # it was in a forward that is not remembered
        before = [one for one in self._inside.get(call, ()) if one.ended < reading.moment]
        left = [one for call in before for one in call.outputs]
        if call is not None:
            left += call.inputs if call.given is None or reading not in call.inputs else call.given
        bad = _without_masks([one for one in left if self._is_bad(one)])
        is_told = call is not None or reading in self._losses
        is_handled = any(self._makes_finite(one) for one in before)
        if bad and (not is_told or is_handled or len(set(map(self._first, bad))) > 1):
            raise _NotKnownError
        return bad

    def _hides_all(self, by: Operation) -> bool:
        """Whether a softmax made nan of a row that a mask which came in with the data hides."""
        bad = [one for one in by.inputs if self._is_bad(one)] if by.name in _SOFTMAX else []
        if not bad or not all(one.is_minus_infinity for one in bad):
            return False
        firsts = [self._first(one) for one in bad]
        return all(one.by is None and one.inside is None for one in firsts)

    def _makes_finite(self, call: Pass) -> bool:
        given = call.inputs if call.given is None else call.given
        return any(map(self._is_bad, given)) and not any(map(self._is_bad, call.outputs))

    def _is_bad(self, reading: Reading) -> bool:
        return not reading.is_finite and not self._is_mask(reading)

    def _is_mask(self, reading: Reading) -> bool:
        """Whether it is minus infinity on purpose: a number of the program, and what it led to."""
        pending = [reading]
        while pending:
            one = pending[-1]
            bad = [] if one.by is None else [s for s in one.by.inputs if not s.is_finite]
            todo = [source for source in bad if source not in self._masks]
            if one not in self._masks and not todo:
                if one.by is None:  # a buffer, or what else a module keeps
                    call = one.inside
                    is_own = call is not None and call.has_grad and not one.is_leaf
                else:
                    is_own = bool(bad) or one.by.has_constant
                is_mask = is_own and all(self._masks[source] for source in bad)
                self._masks[one] = is_mask and one.is_minus_infinity
            pending += todo
            if not todo:
                pending.pop()
        return self._masks[reading]


def _without_masks(bad: Sequence[Reading]) -> Sequence[Reading]:
    """Leave out minus infinity that was given, if there is more: it may be to mask the others."""
    other = [one for one in bad if one.by is not None or not one.is_minus_infinity]
    return other or bad


def _bad_output(seen: Pass) -> Reading:
    """One of the gradients that were not finite: one with nan, where there is one.

    A backward makes several at once, and which comes first says nothing.
    """
    bad = [one for one in seen.outputs if not one.is_finite]
    return next((one for one in bad if one.has_nan), bad[0])


def _cast(seen: Pass) -> _Origin | None:
    """The cast within its function of an argument that is too large, if the loss stayed finite."""
    call, by = seen.call, seen.operation
    if call is None or by is None:
        return None
    bad = _bad_output(seen)
    limit = torch.finfo(bad.dtype).max
    given = call.inputs if call.given is None else call.given
    if not any(one in given and one.max_abs > limit for one in by.inputs):
        return None
    return _Origin(call, "input cast", bad, seen.ended, given, by)
