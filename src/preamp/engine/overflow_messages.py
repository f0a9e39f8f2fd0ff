# SPDX-License-Identifier: BSD-3-Clause
"""How an overflow is told, and when enough is enough."""

from __future__ import annotations

from typing import TYPE_CHECKING

from preamp.core.errors import LossScaleError, message
from preamp.core.ranks import has_other_ranks
from preamp.engine.overflow import OverflowCause
from preamp.scaling import SMALLEST_SCALE, DynamicScale, ScaleRule

if TYPE_CHECKING:
    from preamp.numerics import TraceRecord


_CALLS = 16  # of the program, that are told of an operation
_UNWATCHED = (
    "To learn in which module and line it begins, pass overflow='trace' to preamp.initialize. "
)


def overflow_message(cause: OverflowCause, *, with_stack: bool = True) -> str:
    """The line printed for an overflow; of a skipped step Apex's sentences come first.

    Below it stand the calls that led to the operation that is named, if there are several.
    """
    loss = "" if cause.loss_was_finite else "the loss itself is not finite; "
    if cause.was_skipped:
        text = (
            f"Gradient overflow.  Skipping step, loss scaler {cause.loss_id} reducing loss scale "
            f"to {cause.new_scale} (step {cause.step}: {loss}{_where(cause)}; loss scale "
            f"{cause.old_scale} to {cause.new_scale})"
        )
    else:
        text = (
            "Gradient overflow.  The step is taken, since the loss scale is static "
            f"(step {cause.step}: {loss}{_where(cause)}; loss scale {cause.old_scale})"
        )
        if cause.loss_was_finite and cause.old_scale > 1:
            text += ". A smaller loss_scale can help; 'dynamic' finds one, and skips such steps"
    if not cause.was_watched:
        return text
    stack = _stack(cause.trace) if cause.trace is not None and with_stack else ""
    return f"{text}. {_traced(cause.trace)}{stack}"


def _where(cause: OverflowCause) -> str:
    if not cause.parameters or cause.candidates > 1:
        return f"in {cause.named()}"
    kind = cause.kinds[0] if cause.kinds else "inf or nan"
    text = f"{kind} first in {cause.parameters[0]!r}"
    more = len(cause.parameters) - 1
    return f"{text} and in {more} more" if more else text


def _traced(trace: TraceRecord | None) -> str:
    if trace is None and has_other_ranks():
        return (
            "Nothing that was watched on this rank was made infinite or nan: the gradients became "
            "so when ranks exchanged them, and a rank that has seen where it was made prints it. "
            "If none does, it happened outside of the modules, in compiled code, or where "
            "gradients are added up."
        )
    if trace is None:
        return (
            "No module was seen to turn finite values into others: it happened in a forward "
            "outside of the modules, in compiled code, or where gradients are added up, or a "
            "parameter's gradient was changed."
        )
    return trace.told()


def _stack(trace: TraceRecord) -> str:
    """The calls that led to the operation, a line each, if there are several."""
    calls = trace.stack[:_CALLS] if len(trace.stack) > 1 else []
    return "".join(f"\n  {call}" for call in calls)


def _told_by(cause: OverflowCause) -> str:
    """Where it began, or how to learn that."""
    if cause.trace is not None:
        return f"{cause.trace.told()} "
    return "" if cause.was_watched else _UNWATCHED


def scaling_gave_up(cause: OverflowCause, why: str) -> LossScaleError:
    """Return the error for a loss scale that cannot go on, told by its real cause."""
    if not cause.loss_was_finite:
        usual = (
            "Look for the first non-finite activation in the forward: a log or division by zero, a "
            "float16 activation above 65504, a learning rate that is too high"
        )
        return LossScaleError(
            message(
                f"{why}; the loss itself was infinite or nan before scaling "
                f"(loss {cause.loss_id}), so no loss scale can help",
                "The forward must yield a finite loss",
                _told_by(cause) + (usual if cause.trace is None else ""),
            )
        )
    return LossScaleError(
        message(
            f"{why}; the loss is finite but gradients overflow in {cause.named()} at loss scale "
            f"{cause.old_scale} (loss {cause.loss_id})",
            "Dynamic loss scaling needs a clean backward now and then",
            f"{_told_by(cause)}Lower the learning rate or clip, run that layer in float32, or "
            "train in bfloat16 (O4, O5); for weights pre-trained in bfloat16, float16 is often too "
            "narrow",
        )
    )


def check_limits(
    cause: OverflowCause, skips_in_row: int, limit: int | None, rule: ScaleRule
) -> None:
    """Raise `LossScaleError` after too many skips in a row, or at the scale's built-in minimum."""
    if limit is not None and skips_in_row >= limit:
        raise scaling_gave_up(cause, f"{skips_in_row} optimizer steps in a row skipped")
    no_floor = isinstance(rule, DynamicScale) and rule.min_scale is None
    if no_floor and cause.new_scale <= SMALLEST_SCALE:
        raise scaling_gave_up(
            cause, f"The loss scale fell to its minimum, {SMALLEST_SCALE} (2**-24)"
        )
