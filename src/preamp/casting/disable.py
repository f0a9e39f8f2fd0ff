# SPDX-License-Identifier: BSD-3-Clause
"""Blocks without casts, and closures inside them that get the casts back."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from preamp.casting.autocast_state import AutocastState, untraced
from preamp.casting.thread_casts import CASTS, Bracket, open_bracket, unwind_to


@contextlib.contextmanager
def disable_casts() -> Generator[None]:
    """Run the block without casts on this thread: functions as written, models as stored.

    Nests, and ends properly on exceptions. Where no engine is alive it changes nothing: an
    autocast region of the user's own stays on.
    """
    bracket, outermost = _disable()
    try:
        yield
    finally:
        _enable(bracket, outermost)


@untraced
def _disable() -> tuple[Bracket, bool]:
    bracket = open_bracket(None)
    outermost = CASTS.disabled is None
    if outermost:
        CASTS.disabled = bracket.saved
    if CASTS.pushes or len(CASTS.brackets) > 1:
        bracket.saved.without_casts().restore()
    return bracket, outermost


@untraced
def _enable(bracket: Bracket, outermost: bool) -> None:
    unwind_to(bracket)
    if outermost:
        CASTS.disabled = None


@contextlib.contextmanager
def thread_casts_restored() -> Generator[None]:
    """Inside ``disable_casts``: run the block as if outside of it; elsewhere change nothing.

    For a closure that an optimizer step, which runs without casts, calls back.
    """
    disabled = CASTS.disabled
    before = _restore_casts(disabled)
    try:
        yield
    finally:
        CASTS.disabled = disabled
        _set_state(before)


@untraced
def _restore_casts(disabled: AutocastState | None) -> AutocastState:
    before = AutocastState.capture()
    if disabled is not None:
        CASTS.disabled = None
        disabled.restore()
    return before


@untraced
def _set_state(state: AutocastState) -> None:
    state.restore()
