# SPDX-License-Identifier: BSD-3-Clause
"""What is known about an overflow: noted with each backward, read when a step is skipped."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from preamp.core.tensors import all_finite, host_reaches, local_of
from preamp.engine.order import Graph, followed, released, sort_by_time
from preamp.kernels import Census

if TYPE_CHECKING:
    from preamp.numerics import OverflowRecord, TraceRecord

Kind = Literal["inf", "nan"]
_NAMED = 16  # parameters in one line
NOT_HERE = "a gradient that another rank has a part of, and not in the part of this rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowCause:
    """What overflowed before one step, which was skipped unless the loss scale is static.

    Attributes:
        step: Number of the ``optimizer.step`` call, counted from 1, skipped ones included.
        loss_id: Which loss's backward overflowed.
        parameters: Qualified names of the parameters with infinite or nan gradients, in the order
            in which that backward made them.
        candidates: How many of them, from the first on, may have been the first: 1 where the order
            is known, all of them where it is not. 0 without parameters.
        kinds: For each of them ``"nan"`` if there is one, else ``"inf"``.
        loss_was_finite: Whether the loss itself, before scaling, was finite. If not, no loss
            scale can help.
        old_scale: Loss scale of that backward.
        new_scale: Loss scale now.
        was_watched: Whether the modules were watched, as `Engine.trace_overflow` asks.
        trace: The first module whose values became infinite or nan, if that was found.
        was_skipped: Whether the step was skipped; with a static loss scale it was taken.
        was_elsewhere: Whether other ranks saw it, in their parts of the gradients, and this one
            did not.
    """

    step: int
    loss_id: int
    parameters: tuple[str, ...]
    loss_was_finite: bool
    old_scale: float
    new_scale: float
    candidates: int = 1
    kinds: tuple[Kind, ...] = ()
    was_watched: bool = False
    trace: TraceRecord | None = None
    was_elsewhere: bool = False
    was_skipped: bool = True

    def named(self) -> str:
        """The overflowing parameters in words: those that may be the first, and how many more."""
        if not self.parameters:
            return NOT_HERE if self.was_elsewhere else "no gradient of this optimizer"
        first = self.parameters[: min(self.candidates, _NAMED)]
        more = len(self.parameters) - len(first)
        text = ", ".join(map(repr, first)) + (f" and {more} more" if more else "")
        if self.candidates <= 1:
            return text
        which = "all of which" if self.candidates == len(self.parameters) else "of which the named"
        if self.candidates > len(first):
            which = f"of which {self.candidates}"
        return f"{text}, {which} may have been the first"

    def to_record(self) -> OverflowRecord:
        """Return it as a line of a run's history."""
        from preamp.numerics import OverflowRecord

        return OverflowRecord(
            step=self.step,
            loss_id=self.loss_id,
            parameters=list(self.parameters),
            candidates=self.candidates,
            loss_was_finite=self.loss_was_finite,
            old_scale=self.old_scale,
            new_scale=self.new_scale,
            trace=self.trace,
            kinds=list(self.kinds),
            was_skipped=self.was_skipped,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """What the watching of one step has come to."""

    was_watched: bool  # whether the whole step was watched, or the forward of any module
    trace: TraceRecord | None = None  # the first to go wrong, if it was found


@dataclass(slots=True, eq=False)
class GradientNote:
    """Device-side findings about one backward; read only if the step turns out to be skipped."""

    loss_id: int
    # Bool scalar tensor, whether the unscaled loss was finite, and those before it whose gradients
    # were left scaled
    loss_finite: torch.Tensor
    scale: torch.Tensor  # float32 scalar tensor, the scale it was multiplied by
    # Of the backwards that made the gradients; they tell which was made first
    graphs: list[Graph] = field(default_factory=list[Graph])
    # Told whether the loss was finite. ``None`` if nobody watched
    watched: Callable[[bool], Finding] | None = None
    # Per optimizer, float32 scalar, not zero if a gradient overflowed on any rank
    found_inf: list[torch.Tensor] = field(default_factory=list[torch.Tensor])
    # Per optimizer, parameters, and the largest magnitude of each one's gradient
    found: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = field(
        default_factory=list[tuple[Sequence[torch.Tensor], torch.Tensor]]
    )

    def add(
        self, params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], census: Census
    ) -> None:
        """Note an optimizer's gradients unless known to be finite."""
        max_abs = census.max_abs
        if max_abs is None:
            return
        if not host_reaches(census.found_inf):
            self.graphs = released(self.graphs)
        elif bool(census.found_inf != 0):
            self.graphs = followed(self.graphs)
            for place, grad in enumerate(grads):  # one beyond float32 is infinite in the census
                if grad.dtype is torch.float64 and bool(all_finite(local_of(grad))):
                    max_abs = max_abs.index_fill(0, max_abs.new_tensor([place]).long(), 0.0)
        self.found.append((params, max_abs))

    def overflowing(self) -> Iterator[tuple[torch.Tensor, Kind]]:
        """The parameters with infinite or nan gradients, each once, and which. Synchronises."""
        told: set[int] = set()  # a weight in several optimizers may be in the census of each
        for params, max_abs in self.found:
            magnitudes = cast("list[float]", cast("Any", max_abs).tolist())
            for param, magnitude in zip(params, magnitudes, strict=True):
                if not math.isfinite(magnitude) and id(param) not in told:
                    told.add(id(param))
                    yield param, "nan" if math.isnan(magnitude) else "inf"


def find_cause(
    notes: Sequence[GradientNote],
    step: int,
    scales: Sequence[float],
    name_of: Callable[[torch.Tensor], str],
    *,
    was_skipped: bool = True,
) -> OverflowCause:
    """Return the cause of a skipped step: the first overflowing backward. Synchronises.

    ``notes`` are of the backwards since the last step, oldest first; there are none if the overflow
    was read from a checkpoint. ``scales`` are those of now, by loss.
    """
    if not notes:
        return OverflowCause(
            step=step,
            loss_id=0,
            parameters=(),
            loss_was_finite=True,
            old_scale=scales[0],
            new_scale=scales[0],
        )
    was_elsewhere = False
    for note in notes:
        found = list(note.overflowing())
        was_elsewhere = not found and any(bool(flag != 0) for flag in note.found_inf)
        if found or was_elsewhere:  # an infinite loss may have finite gradients: skips nothing
            break
    else:  # so many backwards ago that its note is gone
        note, found = notes[0], []
    found, candidates = sort_by_time(note.graphs, found, lambda item: item[0])
    loss_was_finite = bool(note.loss_finite.item())
    finding = None if note.watched is None else note.watched(loss_was_finite)
    return OverflowCause(
        step=step,
        loss_id=note.loss_id,
        parameters=tuple(name_of(param) for param, _ in found),
        candidates=candidates,
        kinds=tuple(kind for _, kind in found),
        loss_was_finite=loss_was_finite,
        old_scale=float(note.scale.item()),
        new_scale=scales[note.loss_id],
        was_watched=finding is not None and finding.was_watched,
        trace=None if finding is None else finding.trace,
        was_elsewhere=was_elsewhere,
        was_skipped=was_skipped,
    )
