# SPDX-License-Identifier: BSD-3-Clause
"""The block of a training loop: ``scale_loss``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from preamp.casting import settle_thread
from preamp.core.errors import bad_type, with_article
from preamp.core.ranks import has_process_group
from preamp.core.tensors import all_finite
from preamp.core.undo import Step, UndoStack, run_all
from preamp.engine import refusals
from preamp.engine.engine import Engine
from preamp.engine.lookup import as_optimizers, common_engine
from preamp.engine.order import released
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import NO_ANSWER, REDUCED
from preamp.engine.session import Exit, OptimizerSession, Plan
from preamp.scaling import LossScaler


@contextmanager
def scale_loss(
    loss: torch.Tensor,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    loss_id: int = 0,
    model: object = None,
    delay_unscale: bool = False,
    delay_overflow_check: bool = False,
) -> Generator[torch.Tensor]:
    """Scale ``loss`` for the backward in the body, and unscale the gradients afterwards.

    After the block the gradients of everything the optimizers update are unscaled: ``p.grad`` of
    float32 parameters, and ``grad`` of the float32 masters of half parameters. Gradients that
    were there before are added to, whatever scale they were made with. If the body raises, they
    are restored and the loss scale stays as it was.

    Args:
        loss: Floating tensor of any shape; a non-scalar needs a gradient in ``backward``.
        optimizers: Every optimizer whose parameters get gradient from this backward: one, or any
            sequence of them.
        loss_id: Which loss scaler to use, 0 to ``num_losses - 1``.
        model: Ignored; Apex had it.
        delay_unscale: The same as ``delay_overflow_check``; for all but the last backward of an
            accumulation. Apex leaves gradients scaled then; here they are unscaled at once, and
            added up in float32.
        delay_overflow_check: Unscale and check, but let a later ``scale_loss`` of the same loss
            adjust the loss scale. An overflow is not lost: the next step is skipped.

    Yields:
        ``loss`` in float32 (float64 stays) times the loss scale; ``loss`` itself if preamp is
        off.

    Raises:
        PreampStateError: An optimizer has no engine, or belongs to another engine; a gradient
            is sparse where a master cannot take it; or ``backward`` was called on ``loss``.
        IndexError: There is no loss ``loss_id``.
        TypeError: ``loss`` is not a floating-point tensor.

    Mutates:
        Gradients, and the loss scale. Synchronises with the device: never.
    """
    del model
    settle_thread()
    members = as_optimizers(optimizers)
    engine = common_engine(members)
    if not engine.policy.enabled:
        yield loss
        return
    check_loss(loss)
    block = Block(engine, members, loss, loss_id)
    is_late = delay_unscale or delay_overflow_check or block.is_plain
    try:
        block.begin()
        yield block.scale(loss)
        block.finish(adjust=not is_late)
    except BaseException:
        block.abort()
        raise
    finally:
        block.exit.is_over = True


class Block:
    """One scaled backward: of a ``with scale_loss`` block, or what a `GradScaler` keeps open.

    It ends in one of two ways: as if it had not been, or complete. Which, is decided where the list
    of the steps to that end is kept; up to there anything that raises takes the block back. From
    there on whatever an interrupt leaves of the list is done before anything else is: by `abort`,
    which is called for whatever raises, and else by the next call that concerns the optimizer.
    """

    def __init__(
        self,
        engine: Engine,
        optimizers: Sequence[torch.optim.Optimizer],
        loss: torch.Tensor,
        loss_id: int,
    ) -> None:
        self.scaler: LossScaler = engine.scaler(loss_id)
        self.loss = loss
        self.sessions = [engine.sessions[id(optimizer)] for optimizer in optimizers]
        # The scale at the beginning is the block's, whatever a block inside does to the scaler.
        self.note = GradientNote(
            loss_id=loss_id, loss_finite=all_finite(loss.detach()), scale=self.scaler.scale.clone()
        )
        # Whose graph tells which gradient was made first
        self.backward_of: torch.Tensor | None = loss
        self._engine = engine
        self._hooks: list[RemovableHandle] = []
        self.reached: set[str] = set()  # by the body's backwards: the loss, what was yielded
        self.begun: list[OptimizerSession] = []  # whose earlier gradients are aside
        self.exit = Exit()
        self._end: UndoStack | None = None  # what is left to do, once that is decided
        self._reaction: Callable[[], None] | None = None  # of the loss scale
        self._has_ranks = has_process_group()
        self._answers = engine.reductions.begin_block() if self._has_ranks else NO_ANSWER

    @property
    def is_plain(self) -> bool:
        """Whether gradients are unscaled as they come, and nothing is to be done but to add."""
        return self.scaler.is_identity and not self._engine.policy.master_weights

    def begin(self) -> None:
        """Set earlier gradients aside; takes itself back if it fails."""
        self._engine.has_scaled = True
        for session in self.sessions:
            session.end_left_open()
            session.refuse_nested()
            session.accept_backwards()
        if self._engine.reductions.unasked:
            for session in self.sessions:
                self._engine.reductions.compare_late(session.model_params)
        if self._engine.unreduced.models:
            self._engine.unreduced.begin(self.scaler)
        for tell in self._engine.events.block_begins:
            tell(self)
        plan = Plan(self.scaler, may_reduce=True in self._answers, exit=self.exit)
        for session in self.sessions:  # before any sets gradients aside that another one shares
            session.adopt()
        claimed: set[int] = set()
        try:
            for session in self.sessions:
                self.begun.append(session)
                session.begin_backward(plan, claimed)
                if session.found_inf is None:
                    self._engine.adjustments.dropped([session])
        except BaseException:
            self.abort()
            raise

    def part(self, session: OptimizerSession) -> Block:
        """The same backward, of one of its optimizers."""
        one = copy.copy(self)
        one.sessions = one.begun = [session]
        one.note = replace(self.note, found_inf=[], found=[], graphs=[])
        one.backward_of = None  # it is over before anybody asks
        return one

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss to call ``backward`` on."""
        scaled = self.scaler.scale_loss(loss, self.note.scale)
        if not self.scaler.is_identity and loss.requires_grad:
            for name, tensor in (("loss", loss), ("scaled loss", scaled)):
                hooked: Any = tensor
                self._hooks.append(hooked.register_hook(partial(self._reach, name)))
        for tell in self._engine.events.loss_scaled:
            tell(scaled)
        return scaled

    def _reach(self, name: str, grad: torch.Tensor) -> None:
        del grad
        self.reached.add(name)

    def _end_body(self) -> None:
        if self.backward_of is not None:
            self.note.graphs.append(self.backward_of.grad_fn)
        self._remove_hooks()
        # Gradients of the loss itself nobody scaled. Nothing is noted where a `GradScaler` scales.
        if self.reached == {"loss"} and any([one.holds_raw() for one in self.sessions]):
            raise refusals.backward_of_loss()

    def _conclude(self, steps: Sequence[Step]) -> None:
        """Let ``steps`` be what is left to do, and do it."""
        self._end = UndoStack.of(steps)
        for session in self.begun:
            session.ending = self._end
        self._end.unwind()

    def abort(self) -> None:
        """Drop what came and put earlier gradients back; or go on with an end that has begun."""
        if self._end is not None:
            try:
                self._end.unwind()
            finally:  # a step that has failed twice is not to leave a block open
                if self._end.is_done:
                    run_all([one.undo for one in self.begun])
            return
        steps: list[Step] = [self._remove_hooks]
        steps += [one.undo for one in self.begun]
        if self.begun:
            steps += [self._end_ranks, self._follow_unreduced]
        self._conclude(steps)

    def _end_ranks(self) -> None:
        if self._has_ranks:
            self._engine.reductions.end_block()

    def _follow_unreduced(self) -> bool:
        """Whether the gradients were left unreduced; see `Unreduced.end`."""
        unreduced = self._engine.unreduced
        return bool(unreduced.models) and unreduced.end(self.scaler)

    def finish(self, *, adjust: bool, record: Callable[[torch.Tensor], None] | None = None) -> None:
        """Unscale what came and add earlier gradients.

        ``record``, or the scaler, is told of a flag of overflow if one was made; the loss scale may
        ``adjust`` to what it has been told.
        """
        try:
            self._end_body()
            for tell in self._engine.events.gradients_made:
                tell(self)
            answers = self._answers
            if answers == REDUCED:  # forwards inside the block were not known when it began
                answers = self._engine.reductions.begin_block()
            steps, found_inf = unscale(
                self.sessions, self.scaler, self.note, is_reduced=answers == REDUCED
            )
            tells = [_once(partial(tell, self)) for tell in self._engine.events.block_over]
            hear = partial(self._hear, found_inf, record or self.scaler.record, False in answers)
            self._conclude([*steps, self._end_ranks, *tells, partial(hear, adjust=adjust)])
        except BaseException:
            self.abort()
            raise

    def _hear(
        self,
        found_inf: torch.Tensor | None,
        record: Callable[[torch.Tensor], None],
        is_local: bool,
        *,
        adjust: bool,
    ) -> None:
        """Let the loss scale hear of an overflow, and react; or later, if this is ``is_local``."""
        adjustments = self._engine.adjustments
        if self._follow_unreduced() or is_local:
            # Other ranks may not know of an overflow here yet.
            adjustments.later(self.scaler, self.sessions, found_inf, is_due=adjust)
            return
        if found_inf is not None:
            record(found_inf)
        adjustments.reduced(self.sessions, found_inf)
        if adjust:
            self._reaction = self._reaction or adjustments.reaction(self.scaler)
            self._reaction()


def _once(listener: Step) -> Step:
    """A step that is not run again where it has raised."""
    left = [listener]
    return lambda: left.pop()() if left else None


def unscale(
    sessions: Sequence[OptimizerSession],
    scaler: LossScaler,
    note: GradientNote,
    *,
    is_reduced: bool = False,
) -> tuple[list[Step], torch.Tensor | None]:
    """Look for overflow, unscale, add earlier gradients; return what commits that for good.

    Whoever refuses, runs out of memory or is interrupted before has to `OptimizerSession.undo`, and
    gradients are those from before the block. The steps may run twice.

    Returns also a float32 scalar, not zero if any new gradient overflowed, which the scaler has yet
    to be told; ``None`` if nobody looked. ``note`` holds the scale and is filled with what is
    found; ``is_reduced`` says that all gradients have certainly been reduced over ranks.
    """
    # An overflow skips the steps of all. Where steps are taken each optimizer has a note of its own
    # of what was found, if anybody looks.
    is_shared = scaler.is_dynamic or note.watched is None
    notes = [note if is_shared else replace(note, found_inf=[], found=[]) for _ in sessions]
    for session in sessions:
        session.arrive()
    found = [s.census(scaler, own) for s, own in zip(sessions, notes, strict=True)]
    factor = None if scaler.is_identity else note.scale.reciprocal()
    for session in sessions:
        session.merge(factor)
    steps: list[Step] = [partial(s.commit, factor, is_reduced=is_reduced) for s in sessions]
    for session, own in zip(sessions, notes, strict=True):
        if own.watched is not None and not scaler.is_dynamic:
            own.graphs = released(own.graphs)
            steps.append(partial(session.remember_watched, own))
            note.found_inf = [flag for each in notes for flag in each.found_inf]
    pairs = [(s, flag) for s, flag in zip(sessions, found, strict=True) if flag is not None]
    for _, found_inf in pairs:
        steps += [partial(session.remember, found_inf, note) for session in sessions]
    return steps, functools.reduce(torch.maximum, [f for _, f in pairs]) if pairs else None


def check_loss(loss: Any, who: str = "scale_loss") -> None:
    """Raise `TypeError` unless ``loss`` is a real floating-point tensor."""
    if isinstance(loss, torch.Tensor) and loss.is_floating_point():
        return
    is_tensor = isinstance(loss, torch.Tensor)
    got = f"a {loss.dtype} tensor" if is_tensor else with_article(type(loss).__name__)
    raise bad_type(
        f"{who} was given {got} as the loss",
        "The loss must be a floating-point tensor",
        "Pass the tensor that backward() will be called on, not loss.item() or a tuple",
    )
