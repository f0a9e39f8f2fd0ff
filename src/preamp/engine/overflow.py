# SPDX-License-Identifier: BSD-3-Clause
"""What is known about an overflow, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from preamp.core.errors import LossScaleError, message
from preamp.scaling import SMALLEST_SCALE, DynamicScale, ScaleRule


@dataclass(frozen=True, slots=True, kw_only=True)
class OverflowCause:
    """Why one step was skipped.

    Attributes:
        step: Number of the ``optimizer.step`` call, counted from 1, skipped ones included.
        loss_id: Which loss's backward overflowed.
        parameters: Qualified names of the parameters with infinite or nan gradients, in the
            order of the optimizer's groups.
        loss_was_finite: Whether the loss itself, before scaling, was finite. If not, no loss
            scale can help.
        old_scale: Loss scale of that backward.
        new_scale: Loss scale now.
    """

    step: int
    loss_id: int
    parameters: tuple[str, ...]
    loss_was_finite: bool
    old_scale: float
    new_scale: float

    def named(self) -> str:
        """The overflowing parameters in words: the first one, and how many more."""
        if not self.parameters:
            return "no gradient of this optimizer"
        more = len(self.parameters) - 1
        return f"{self.parameters[0]!r}" + (f" and {more} more" if more else "")


@dataclass(slots=True, eq=False)
class GradientNote:
    """Device-side findings about one backward; read only if the step turns out to be skipped.

    Attributes:
        loss_id: Which loss.
        loss_finite: Bool scalar tensor, whether the unscaled loss was finite.
        scale: float32 scalar tensor, the scale it was multiplied by.
        found: Per optimizer, parameters and the largest magnitude of each one's gradient.
    """

    loss_id: int
    loss_finite: torch.Tensor
    scale: torch.Tensor
    found: list[tuple[Sequence[torch.Tensor], torch.Tensor]] = field(
        default_factory=list[tuple[Sequence[torch.Tensor], torch.Tensor]]
    )

    def add(self, params: Sequence[torch.Tensor], max_abs: torch.Tensor | None) -> None:
        """Note the gradients of one optimizer; nothing where they are known to be finite."""
        if max_abs is not None:
            self.found.append((params, max_abs))

    def overflowing(self) -> list[torch.Tensor]:
        """The parameters whose gradient was infinite or nan. Synchronises."""
        overflowing: list[torch.Tensor] = []
        for params, max_abs in self.found:
            largest = cast("list[float]", cast("Any", max_abs).tolist())
            overflowing += [p for p, x in zip(params, largest, strict=True) if not math.isfinite(x)]
        return overflowing


def find_cause(
    notes: Sequence[GradientNote],
    step: int,
    scales: Sequence[float],
    name_of: Callable[[torch.Tensor], str],
) -> OverflowCause:
    """Return the cause of a skipped step: the first overflowing backward. Synchronises.

    Args:
        notes: Of the backwards since the last step, oldest first; none if the overflow was read
            from a checkpoint.
        step: Number of the skipped step.
        scales: The loss scales now, by loss.
        name_of: Names parameters.
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
    for note in notes:
        params = note.overflowing()
        if params:  # an infinite loss may have finite gradients, and then skips nothing
            break
    else:  # so many backwards ago that its note is gone
        note, params = notes[0], []
    return OverflowCause(
        step=step,
        loss_id=note.loss_id,
        parameters=tuple(map(name_of, params)),
        loss_was_finite=bool(note.loss_finite.item()),
        old_scale=float(note.scale.item()),
        new_scale=scales[note.loss_id],
    )


def skip_message(cause: OverflowCause) -> str:
    """The line printed for a skipped step; its first sentences are the ones Apex printed."""
    where = (
        f"first in {cause.named()}" if cause.loss_was_finite else "the loss itself is not finite"
    )
    return (
        f"Gradient overflow.  Skipping step, loss scaler {cause.loss_id} reducing loss scale to "
        f"{cause.new_scale} ({where})"
    )


def scaling_gave_up(cause: OverflowCause, why: str) -> LossScaleError:
    """Return the error for a loss scale that cannot go on, told by its real cause."""
    if not cause.loss_was_finite:
        return LossScaleError(
            message(
                f"{why}; the loss itself was infinite or nan before scaling "
                f"(loss {cause.loss_id}), so no loss scale can help",
                "The forward must yield a finite loss",
                "Look for the first non-finite activation in the forward: a log or division by "
                "zero, a float16 activation above 65504, a learning rate that is too high",
            )
        )
    return LossScaleError(
        message(
            f"{why}; the loss is finite but gradients overflow in {cause.named()} at loss scale "
            f"{cause.old_scale} (loss {cause.loss_id})",
            "Dynamic loss scaling needs a clean backward now and then",
            "Lower the learning rate or clip, run that layer in float32, or train in bfloat16 "
            "(O4, O5); for weights pre-trained in bfloat16, float16 is often too narrow",
        )
    )


def check_limits(
    cause: OverflowCause, skips_in_row: int, limit: int | None, rule: ScaleRule
) -> None:
    """Give up where scaling cannot go on.

    Args:
        cause: Of the latest skipped step.
        skips_in_row: Skipped steps since the last applied one.
        limit: How many of them are too many; ``None`` for no limit.
        rule: Of the scaler of the loss that overflowed.

    Raises:
        LossScaleError: Too many skips in a row, or the scale reached its built-in minimum.
    """
    if limit is not None and skips_in_row >= limit:
        raise scaling_gave_up(cause, f"{skips_in_row} optimizer steps in a row skipped")
    no_floor = isinstance(rule, DynamicScale) and rule.min_scale is None
    if no_floor and cause.new_scale <= SMALLEST_SCALE:
        raise scaling_gave_up(
            cause, f"The loss scale fell to its minimum, {SMALLEST_SCALE} (2**-24)"
        )
