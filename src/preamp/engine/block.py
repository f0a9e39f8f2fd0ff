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

from preamp.core.errors import bad_type, with_article
from preamp.core.ranks import has_process_group
from preamp.core.tensors import all_finite
from preamp.core.undo import Step, run_all, unwind
from preamp.engine import refusals
from preamp.engine.core import Late
from preamp.engine.engine import Engine
from preamp.engine.lookup import as_optimizers, common_engine
from preamp.engine.order import released
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import NO_ANSWER, REDUCED
from preamp.engine.session import Exit, OptimizerSession
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
    members = as_optimizers(optimizers)
    engine = common_engine(members)
    if not engine.policy.enabled:
        yield loss
        return
    check_loss(loss)
    block = Block(engine, members, loss, loss_id)
    # At a static scale of 1 float32 gradients are nothing but added.
    is_plain = block.scaler.is_identity and not engine.policy.master_weights
    is_late = delay_unscale or delay_overflow_check or is_plain
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
        if not 0 <= loss_id < len(engine.scalers):
            raise refusals.no_such_loss(loss_id, len(engine.scalers))
        self.scaler: LossScaler = engine.scalers[loss_id]
        self.loss = loss
        self.sessions = list(map(engine.sessions.__getitem__, map(id, optimizers)))
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
        self._is_decided = False  # how it ends: the steps are in `exit`
        self._reaction: Callable[[], None] | None = None  # of the loss scale
        self._answers, self._end_ranks = NO_ANSWER, list[Step]()
        if has_process_group():
            self._answers = engine.reductions.begin_block()
            self._end_ranks.append(engine.reductions.end_block)

    def begin(self, *, is_held_open: bool = False) -> None:
        """Set earlier gradients aside; takes itself back if it fails.

        It ``is_held_open`` by a `GradScaler`, within which scripts drop and zero gradients.
        """
        self._engine.has_scaled = True
        for session in self.sessions:
            session.check_outside_block("scale_loss")
        if self._engine.reductions.unasked:
            for session in self.sessions:
                self._engine.reductions.compare_late(session.model_params)
        if self._engine.unreduced.models:
            self._engine.unreduced.begin(self.scaler)
        for tell in self._engine.events.block_begins:
            tell(self)
        for session in self.sessions:  # before any sets gradients aside that another one shares
            session.table.adopt()
        room: Any = {"may_reduce": True in self._answers, "is_held_open": is_held_open}
        claimed = set[int]()
        try:
            for session in self.sessions:
                self.begun.append(session)
                session.begin(self.scaler, claimed, **room, block_exit=self.exit)
        except BaseException:
            self.abort()
            raise

    def part(self, session: OptimizerSession) -> Block:
        """The same backward, of one of its optimizers."""
        one = copy.copy(self)
        one.sessions = one.begun = [session]
        one.exit = session.exit = Exit()
        one.note = replace(self.note, found_inf=[], found=[], graphs=[])
        one.backward_of = None  # it is over before anybody asks
        return one

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

    def abort(self) -> None:
        """Drop what came and put earlier gradients back; or go on with an end that has begun."""
        left = self.exit.left
        if self._is_decided:
            try:
                unwind(left)
            finally:  # a step that has failed twice is not to leave a block open
                if not left:
                    run_all([one.undo for one in self.begun])
            return
        steps: list[Step] = [hook.remove for hook in self._hooks]
        steps += [one.undo for one in self.begun]
        if self.begun:
            steps += [*self._end_ranks, partial(self._engine.unreduced.end, self.scaler)]
        left[:] = steps[::-1]
        self._is_decided = True
        unwind(left)

    def finish(self, *, adjust: bool, record: Callable[[torch.Tensor], None] | None = None) -> None:
        """Unscale what came and add earlier gradients.

        ``record``, or the scaler, is told of a flag of overflow if one was made; the loss scale may
        ``adjust`` to what it has been told.
        """
        try:
            if self.backward_of is not None:
                self.note.graphs.append(self.backward_of.grad_fn)
            for hook in self._hooks:
                hook.remove()
            # Gradients of the loss itself nobody scaled. A `GradScaler` does not ask.
            if self.reached == {"loss"} and any([one.holds_raw() for one in self.sessions]):
                raise refusals.backward_of_loss()
            for tell in self._engine.events.gradients_made:
                tell(self)
            answers = self._answers
            if answers == REDUCED:  # forwards inside the block were not known when it began
                answers = self._engine.reductions.begin_block()
            steps, found_inf = unscale(
                self.sessions, self.scaler, self.note, is_reduced=answers == REDUCED
            )
            steps += self._end_ranks
            for tell in self._engine.events.block_over:
                steps.append(_once(partial(tell, self)))
            hear = partial(self._hear, found_inf, record or self.scaler.record, False in answers)
            steps.append(partial(hear, adjust=adjust))
            self.exit.left[:] = steps[::-1]
            self._is_decided = True
            unwind(self.exit.left)
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
        """Let the loss scale hear of an overflow, and react; or later, if this is ``is_local``.

        Ranks keep one scale because each reacts to what all have seen. What gradients that nobody
        has reduced show stays out of it: the reduction shows it to all ranks, in whichever loss's
        backward that comes. If none comes, the step tells.
        """
        late, unreduced = self._engine.late_scalers, self._engine.unreduced
        if (unreduced.models and unreduced.end(self.scaler)) or is_local:
            before = late.get(self.scaler, Late(frozenset(), is_due=False))
            sessions = before.sessions.union(self.begun)
            late[self.scaler] = Late(sessions, is_due=adjust or before.is_due)
            return
        if found_inf is not None:
            record(found_inf)
        if adjust:
            late.pop(self.scaler, None)
            self._reaction = self._reaction or self.scaler.reaction()
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
    """Unscale gradients of all; return what commits that for good.

    Whoever refuses, runs out of memory or is interrupted before has to `OptimizerSession.undo`, and
    gradients are those from before the block. The steps may run twice.

    Returns also a float32 scalar, not zero if any new gradient overflowed, which the scaler has yet
    to be told; ``None`` if nobody looked. ``note`` holds the scale and is filled with what is
    found; ``is_reduced`` says that all gradients have certainly been reduced over ranks.
    """
    # An overflow skips the steps of all. Where steps are taken each optimizer has a note of its own
    # of what was found, if anybody looks.
    have_own = note.watched is not None and not scaler.is_dynamic
    notes = [note] * len(sessions)
    if have_own:
        notes = [replace(note, found_inf=[], found=[]) for _ in sessions]
    factor = None if scaler.is_identity else note.scale.reciprocal()
    steps, flags = list[Step](), list[torch.Tensor]()
    for session, own in zip(sessions, notes, strict=True):
        flag = session.unscale(scaler, own, factor, is_reduced=is_reduced)
        flags += [] if flag is None else [flag]
        steps.append(partial(session.commit, factor, is_reduced=is_reduced))
    if have_own:
        note.found_inf = [flag for own in notes for flag in own.found_inf]
        for session, own in zip(sessions, notes, strict=True):
            own.graphs = released(own.graphs)
            steps.append(partial(session.remember_watched, own))
    if not flags:
        return steps, None
    found_inf = functools.reduce(torch.maximum, flags)
    for session in sessions:
        steps.append(partial(session.remember, found_inf, note))
    return steps, found_inf


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
