# SPDX-License-Identifier: BSD-3-Clause
"""What a run leaves behind: one kind of record per kind of event, each a line of JSON.

The lines are the format of ``run.jsonl``. Every line is an object with ``"kind"`` and the fields
of the class; numbers that JSON has no word for are the strings ``"inf"``, ``"-inf"``, ``"nan"``.
What a reader does not know, kinds and fields, it leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal, cast, get_args

from preamp.core.pytree import plain
from preamp.numerics.formats import FORMATS

What = Literal["gradient", "weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """The start of a run, or of its continuation."""

    kind: ClassVar[str] = "run"
    version: int = 1  # of the format of the file
    preamp: str  # preamp's version
    torch: str  # torch's version
    device: str  # such as ``"cpu"`` or ``"NVIDIA H200"``
    opt_level: str  # ``"O0"`` to ``"O5"``
    policy: dict[str, str]  # the decisions, by name, in words
    parameters: dict[str, int]  # elements per parameter, by qualified name, in the models' order
    dtypes: dict[str, str]  # dtype per parameter, by qualified name
    started: str  # date and time, ISO 8601 in UTC
    # For each optimizer its class as ``"class"``, and the options of its first parameter group that
    # are words or numbers.
    optimizers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRecord:
    """Training went on from a checkpoint: lines above of later steps are void."""

    kind: ClassVar[str] = "resume"
    step: int  # the last step that still counts; with several optimizers, of the one with the most
    # The last step of each optimizer, in their order.
    steps: list[int] = field(default_factory=list[int])

    def voids(self, record: Record) -> bool:
        """Whether ``record``, from above this line, is of a step that does not count any more."""
        optimizer: int = getattr(record, "optimizer", len(self.steps))
        last = self.steps[optimizer] if 0 <= optimizer < len(self.steps) else self.step
        step: int = getattr(record, "step", 0)
        return step > last


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One call of ``optimizer.step``."""

    kind: ClassVar[str] = "step"
    step: int  # number of the call, counted from 1, skipped ones included
    # Unscaled loss by loss id, of the last backward before the step; those of non-scalar losses are
    # means.
    losses: dict[int, float]
    scales: dict[int, float]  # loss scale by loss id, after the step
    skipped: bool  # whether the weights stayed as they were
    # Euclidean norm of the unscaled gradients, where ``preamp.clip_grad_norm_`` was called after
    # the last backward; else ``None``.
    norm: float | None = None
    lr: float | None = None  # of the first parameter group
    optimizer: int = 0  # index of the optimizer


Range = list[float]
"""Smallest and largest value of a tensor; both nan if it has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameRecord:
    """What went through a module, forward or backward."""

    module: str  # qualified name; empty for the model itself
    type: str  # class of the module; empty for what runs outside of all modules
    phase: str  # ``"forward"`` or ``"backward"``
    inputs: list[Range]  # of its arguments, or of the gradients that came
    outputs: list[Range]  # of its results, or of the gradients that it made
    # Of its own parameters, of a forward; those of modules inside are left out.
    weights: list[Range] = field(default_factory=list[Range])


Phase = Literal[
    "forward",
    "backward",
    "data",
    "given",
    "weight",
    "input cast",
    "output cast",
    "output cast backward",
]
"""Where a value became infinite or nan; see `TraceRecord`."""


FAILS_AT_ZERO: Final = frozenset(
    "log log2 log10 xlogy logit div truediv true_divide reciprocal rsqrt pow".split()
)
"""Operations that are not finite at zero, so that the largest value they were given says little."""

FAR_BEYOND: Final = 100.0
"""Times the largest float16, from which a forward is wrong in itself: float32 would hide it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Record:
    """What came of computing a forward once more, by a copy of the module in float32."""

    # ``"finite"`` if all values were; else ``"nan"`` or ``"inf"``; ``"failed"`` if it could not be
    # computed.
    found: Literal["finite", "inf", "nan", "failed"]
    max_abs: float | None = None  # largest magnitude of the output, if it was finite
    why: str = ""  # what it failed from

    def told(self, dtype: str) -> str:
        """Return it as a sentence, beside a result in ``dtype`` that was not finite."""
        if self.found == "failed":
            return f"It could not be computed in float32: {self.why}."
        if self.max_abs is None:
            return f"In float32 it is {self.found} as well, so its precision is not the cause."
        size = f"In float32 it is finite, up to {self.max_abs:.4g}"
        if dtype != "float16":
            return f"{size}."
        limit = FORMATS[dtype].largest
        cure = "It can run in float32, or the training in bfloat16 (O4, O5)."
        if self.max_abs <= limit:
            ends = f"{FORMATS[dtype].smallest_subnormal:.2g} to {limit:,.0f}"
            return f"{size}; on the way it leaves float16's range, {ends}. {cure}"
        if self.max_abs < FAR_BEYOND * limit:
            return f"{size}; float16 ends at {limit:,.0f}. {cure}"
        return (
            f"{size}. That is {self.max_abs / limit:,.0f} times float16's largest number, "
            f"{limit:,.0f}: before the precision, look at what goes in, the weights and the "
            "learning rate."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRecord:
    """Where values became infinite or nan first, found by watching all modules."""

    module: str  # qualified name; empty for the model itself
    # Class of the module; empty for what runs outside of all modules, as loss functions do.
    type: str
    # ``"forward"``: its output; ``"backward"``: the gradient of its input or of one of its
    # parameters; ``"data"``: a module was given such values, and neither a module nor a function of
    # torch was seen to make them; ``"given"``: no module was, but what runs outside of them may
    # have; ``"weight"``: a parameter held them that is used outside of the watched modules;
    # ``"input cast"``, ``"output cast"``: the cast of what went in or came out; ``"output cast
    # backward"``: the cast of the gradient of its output.
    phase: Phase
    # Largest finite magnitude that went into the module: forward input, or gradient of output;
    # ``None`` where nothing floating and finite did.
    input_max_abs: float | None
    output_found: Literal["inf", "nan"]  # ``"inf"`` or ``"nan"``
    dtype: str  # of what became non-finite
    # The operation that did, such as ``"matmul"``, or, outside of all modules, the one that was
    # given such values; empty where that is not known.
    operation: str = ""
    # Its line of the program, such as ``"model.py:12"``; empty where that is not known.
    where: str = ""
    # What was seen before, the latest last; at most 8.
    frames: list[FrameRecord] = field(default_factory=list[FrameRecord])
    # Largest finite magnitude of the tensors that the operation was given in its forward; ``None``
    # where that is not known, or nothing floating and finite was.
    operation_max_abs: float | None = None
    # Of a forward: what the same module makes of the same input in float32; ``None`` where that was
    # not tried.
    float32: Float32Record | None = None
    # The lines of the program that led to the operation in its forward, the innermost first, such
    # as ``"model.py:12, in forward"``.
    stack: list[str] = field(default_factory=list[str])
    # The smallest of the same values, with its sign; ``None`` as above.
    operation_min: float | None = None
    # Name of the parameter, the buffer or what else a module keeps that was infinite or nan
    # already; empty where it was another value.
    held: str = ""

    @property
    def given_max_abs(self) -> float | None:
        """Largest finite magnitude that what is named was given: operation, or else module."""
        is_of_operation = self.phase == "forward" and self.operation_max_abs is not None
        return self.operation_max_abs if is_of_operation else self.input_max_abs

    def told(self) -> str:
        """Return it as a sentence, and what float32 makes of it as another."""
        told = self._told()
        return told if self.float32 is None else f"{told} {self.float32.told(self.dtype)}"

    def _told(self) -> str:
        made = f"{self.output_found} in its {self.dtype}"
        where = f"{self.module!r} ({self.type})" if self.module else f"the {self.type} itself"
        if not self.type:
            where = "what runs outside of the modules, such as the loss function,"
        by = f", in {self.operation}" if self.operation else ""
        by += f" at {self.where}" if self.where else ""
        taker = by.removeprefix(", in ") if self.operation and not self.type else where
        given = f"{taker} was given {self.output_found} in a {self.dtype}"
        most = "" if self.given_max_abs is None else f"up to {self.given_max_abs:.4g}"
        if self.held:
            user = f"the forward of {where}" if self.type else taker
            return (
                f"{self.held!r} was {self.output_found} in {self.dtype} already when {user} used "
                "it: nothing in this step was seen to make it so."
            )
        return {
            "forward": f"The first to go wrong was the forward of {where.rstrip(',')}{by}: {made} "
            f"output{self._inputs()}.",
            "backward": f"The first to go wrong was the backward of {where.rstrip(',')}{by}: "
            f"{self.output_found} in a {self.dtype} gradient{self._gradients()}.",
            "data": f"No module was seen to make it: {given} argument. Look at the batch first: it "
            "was there, or came through what cannot be followed, such as numpy or lists.",
            "given": f"No module was seen to make it: {given} argument. Look at the batch first, "
            "then at what the program computes outside of its models or keeps from step to step.",
            "weight": f"A weight held it already: {given} parameter.",
            "input cast": f"The first to go wrong was the cast to {self.dtype} of what {where} was "
            f"given, {most}.",
            "output cast": f"The first to go wrong was the cast to {self.dtype} of the output of "
            f"{where}, {most}.",
            "output cast backward": f"The first to go wrong was the cast to {self.dtype} of the "
            f"gradient of the output of {where}, {most}: it begins too large in the loss.",
        }[self.phase]

    def _inputs(self) -> str:
        """What the forward was given; of what fails at zero also that there is one."""
        most = self.given_max_abs
        if most is None:
            return ""
        if self.operation_min == 0 and self.operation in FAILS_AT_ZERO:
            return f", from values between 0 and {most:.4g}" if most else ", from zeros"
        what = "an input" if most == self.input_max_abs else "values"
        return f", from {what} up to {most:.4g}"

    def _gradients(self) -> str:
        """What the backward was given, and what the forward before it, which it multiplies by."""
        if self.input_max_abs is None:
            return ""
        most = self.operation_max_abs
        before = "" if most is None else f" and values up to {most:.4g} in the forward"
        return f", from an incoming one up to {self.input_max_abs:.4g}{before}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowRecord:
    """What overflowed before a step, which was skipped unless the loss scale is static."""

    kind: ClassVar[str] = "overflow"
    step: int  # number of the call of ``optimizer.step``
    loss_id: int  # which loss's backward overflowed
    # Qualified names of parameters with non-finite gradients, in the order in which the backward
    # made them.
    parameters: list[str]
    loss_was_finite: bool  # whether the loss was finite before scaling
    old_scale: float  # loss scale of that backward
    new_scale: float  # loss scale afterwards
    trace: TraceRecord | None = None  # what watching the modules found, if they were watched
    # For each parameter ``"nan"`` if there is one in its gradient, else ``"inf"``.
    kinds: list[Literal["inf", "nan"]] = field(default_factory=list[Literal["inf", "nan"]])
    optimizer: int = 0  # index of the optimizer
    # How many of them, from the first on, may have been the first: 1 where the order is known.
    candidates: int = 1
    was_skipped: bool = True  # whether the step was


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorStatistics:
    """What is known of one tensor at one step."""

    name: str  # qualified name of the parameter
    what: What  # its gradient, or itself
    dtype: str  # of the tensor, such as ``"float16"``
    form: str  # the half format that the counts below are taken against
    elements: int  # how many there are; all counts are of elements
    zeros: int  # exactly zero
    nonfinite: int  # infinite or nan
    # Not zero, and less than the smallest positive value of the format, with the loss scale on:
    # lost, or rounded up to it, if stored so.
    below_subnormal: int
    below_normal: int  # the same below its smallest normal value: digits are lost
    unscaled_below_subnormal: int  # the same without the loss scale
    unscaled_below_normal: int  # the same without the loss scale
    max_abs: float  # largest finite magnitude, with the loss scale on
    rms: float  # root mean square of the finite values, with the loss scale on
    scale: float = 1.0  # the loss scale that is on the values; 1 for what is never scaled
    # Powers of two between ``max_abs`` and the format's largest value; ``None`` if all is zero.
    headroom: float | None = None
    # Of half weights: elements with a gradient that is not zero whose value the step left as it
    # was. ``None`` where that was not looked at.
    stalled: int | None = None
    # Counts by ``floor(log2(abs(x)))``, with the scale on; ``None`` if not asked for.
    histogram: dict[int, int] | None = None

    @property
    def nonzero(self) -> int:
        """Elements that are finite and not zero."""
        return self.elements - self.zeros - self.nonfinite

    @property
    def underflow(self) -> float:
        """Part of these that is below the smallest normal value of the format."""
        return self.below_normal / self.nonzero if self.nonzero else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsRecord:
    """Statistics of the tensors of one step."""

    kind: ClassVar[str] = "numerics"
    step: int  # number of the call of ``optimizer.step`` that used the gradients
    # Whose backward made the gradients; of several, the last one. 0 where it was seen in no
    # ``scale_loss`` block, as of gradients that the script has set to zero since.
    loss_id: int
    # Gradients first, then weights, each in the order of the optimizer's groups.
    tensors: list[TensorStatistics]
    optimizer: int = 0  # index of the optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class CastRecord:
    """Casts of one function's arguments at one line of source."""

    function: str  # such as ``"linear"``
    source: str  # dtype before
    target: str  # dtype after
    calls: int  # how many tensors were cast
    bytes: int  # bytes read and written by these casts
    where: str  # ``"file.py:12"`` of the caller


Record = RunRecord | ResumeRecord | StepRecord | OverflowRecord | NumericsRecord


_KINDS: dict[str, type[Any]] = {kind.kind: kind for kind in get_args(Record)}
_INSIDE: Final[dict[str, type[Any]]] = {  # fields that have records inside
    "trace": TraceRecord,
    "frames": FrameRecord,
    "float32": Float32Record,
    "tensors": TensorStatistics,
}


def to_json(record: Record) -> dict[str, Any]:
    """Return ``record`` as what ``json.dumps(..., allow_nan=False)`` accepts."""
    return {"kind": record.kind, **plain(record)}


def from_json(line: Mapping[str, Any]) -> Record | None:
    """Return the record of one line, or ``None`` if its kind is unknown.

    Raises `TypeError` or `ValueError` where a field is missing or cannot be what it should.
    """
    if not isinstance(line.get("kind"), str):
        raise ValueError("it has no kind")
    record = _KINDS.get(line["kind"])
    return None if record is None else _made(record, line)


def _made(kind: type[Any], entries: Mapping[str, Any]) -> Any:
    hints = {field.name: str(field.type) for field in dataclasses.fields(kind)}
    return kind(**{k: _value(k, hints[k], v) for k, v in entries.items() if k in hints})


def _value(name: str, hint: str, value: Any) -> Any:
    """What JSON made of a field's value as the field has it."""
    if value is None:
        return None
    if name in _INSIDE:
        make = partial(_made, _INSIDE[name])
        return [*map(make, cast("list[Any]", value))] if isinstance(value, list) else make(value)
    has_floats = "float" in hint or "Range" in hint
    if hint.startswith("dict[int"):
        return {int(key): float(one) if has_floats else one for key, one in value.items()}
    return _floats(value) if has_floats else value


def _floats(value: Any) -> Any:
    """Numbers, in lists or not, also those that JSON has no word for."""
    if isinstance(value, list):
        return [*map(_floats, cast("list[Any]", value))]
    return None if value is None else float(value)
