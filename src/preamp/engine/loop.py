# SPDX-License-Identifier: BSD-3-Clause
"""What a training loop calls: ``scale_loss``, ``clip_grad_norm_``, ``state_dict``."""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from preamp.casting import settle_thread
from preamp.core.errors import PreampStateError, bad_state, bad_type
from preamp.core.link import ATTRIBUTE, Link
from preamp.core.ranks import has_process_group
from preamp.core.tensors import dtype_of, has_sharded, kinds_of
from preamp.engine import refusals
from preamp.engine.engine import Engine
from preamp.engine.order import Watch
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import LOCAL, NO_ANSWER, REDUCED
from preamp.engine.session import OptimizerSession, Plan, Stage
from preamp.optim import LARC
from preamp.optim.rank_norms import norm_of_order, total_norm
from preamp.scaling import LossScaler

_WRAPPED_IN = ("module", "_orig_mod")  # DistributedDataParallel and DataParallel; torch.compile
_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_


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
        delay_unscale: Leave the gradients scaled and do not check them; for all but the last
            backward of an accumulation.
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
    block = _Block(engine, members, loss, loss_id)
    delays = delay_unscale and not block.is_plain
    block.begin(will_delay=delays)
    try:
        yield block.scale(loss)
    except BaseException:
        block.abort()
        raise
    if delays:
        block.delay()
    else:
        block.finish(adjust=not (delay_overflow_check or block.is_plain))


class _Block:
    """One ``with scale_loss`` block."""

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
        self._generation = self.scaler.generation
        self.note = GradientNote(
            loss_id=loss_id,
            loss_finite=torch.isfinite(loss.detach()).all(),
            scale=self.scaler.scale.clone(),
        )
        self._engine = engine
        self._watch: Watch | None = None
        self._hooks: list[RemovableHandle] = []
        self._reached: set[str] = set()  # by the body's backwards: the loss, what was yielded
        self._has_ranks = has_process_group()
        self._answers = engine.reductions.begin_block() if self._has_ranks else NO_ANSWER

    @property
    def is_plain(self) -> bool:
        """Whether gradients are unscaled as they come, and nothing is to be done but to add."""
        if not self.scaler.is_identity or self._engine.policy.master_weights:
            return False
        return not any([s.gradients.stage is Stage.SCALED for s in self.sessions])

    def begin(self, *, will_delay: bool) -> None:
        self._engine.block_begins()
        for session in self.sessions:
            session.refuse_nested()
        if self._engine.reductions.unasked:
            for session in self.sessions:
                self._engine.reductions.compare_late(session.model_params)
        if self._engine.unreduced.models:
            self._engine.unreduced.begin(self.scaler)
        for tell in self._engine.events.block_begins:
            tell(self)
        may_reduce = True in self._answers
        plan = Plan(self.scaler, will_delay=will_delay, may_reduce=may_reduce)
        claimed: set[int] = set()
        for session in self.sessions:  # before any sets gradients aside that another one shares
            session.settle(plan, claimed, self._engine.adjustments)
        claimed = set()
        try:
            for session in self.sessions:
                session.begin_backward(plan, claimed)
                if session.gradients.delayed is not None:
                    self.note.go_on_from(session.gradients.delayed.note)
                if session.found_inf is None:
                    self._engine.adjustments.dropped([session])
            if self.scaler.is_dynamic and self.note.loss_id not in self._engine.order.known:
                self._watch = self._engine.order.watch(self.note.loss_id, self._model_params)
        except BaseException:
            self.abort()
            raise

    def _model_params(self) -> list[torch.Tensor]:
        return [param for session in self.sessions for param in session.model_params()]

    def _end_watch(self, *, has_failed: bool = False) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._watch is not None:
            self._watch.end(has_failed=has_failed)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
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
        self._reached.add(name)

    def _check_backward(self) -> None:
        """Refuse gradients of the loss itself, which nobody scaled; restore the earlier ones."""
        if self._reached != {"loss"}:
            return
        if any([session.gradients.holds_raw() for session in self.sessions]):
            self.abort()
            raise refusals.backward_of_loss()

    def _end_body(self) -> None:
        self._end_watch()
        self._check_backward()
        for session in self.sessions:
            session.gradients.end_body()

    def abort(self) -> None:
        self._end_watch(has_failed=True)
        for session in self.sessions:
            session.gradients.abort()

    def delay(self) -> None:
        self._end_body()
        if self._engine.unreduced.models:
            self._engine.unreduced.end(self.scaler)
        for session in self.sessions:
            session.gradients.delay(self.scaler, self.note, self._generation)
        for tell in self._engine.events.gradients_made:
            tell(self, True)
        self._end_ranks()

    def _end_ranks(self) -> None:
        if self._has_ranks:
            self._engine.reductions.end_block()

    def finish(self, *, adjust: bool) -> None:
        self._end_body()
        try:
            for tell in self._engine.events.gradients_made:
                tell(self, False)
        except BaseException:
            self.abort()
            raise
        is_reduced = False
        if self._answers == REDUCED:  # forwards inside the block were not known when it began
            is_reduced = self._engine.reductions.begin_block() == REDUCED
        found_inf = unscale_and_commit(self.sessions, self.scaler, self.note, is_reduced=is_reduced)
        self._end_ranks()
        for tell in self._engine.events.block_over:
            tell(self)
        adjustments, unreduced = self._engine.adjustments, self._engine.unreduced
        if (unreduced.models and unreduced.end(self.scaler)) or self._answers == LOCAL:
            # Other ranks do not know of an overflow here yet.
            adjustments.later(self.scaler, self.sessions, found_inf, is_due=adjust)
            return
        if found_inf is not None:
            self.scaler.record(found_inf)
        adjustments.reduced(self.sessions, found_inf)
        if adjust:
            adjustments.now(self.scaler)


def unscale_and_commit(
    sessions: Sequence[OptimizerSession],
    scaler: LossScaler,
    note: GradientNote,
    *,
    is_reduced: bool = False,
) -> torch.Tensor | None:
    """End a backward of ``sessions``: look for overflow, unscale, add earlier gradients.

    Nothing is committed before everything has worked for all of them: whoever refuses, runs out of
    memory or is interrupted leaves the gradients from before the block.

    Returns a float32 scalar, not zero if any new gradient overflowed, which the scaler has yet to
    be told; ``None`` if nobody looked. ``note`` holds the scale and is filled with what is found;
    ``is_reduced`` says that all gradients have certainly been reduced over ranks.
    """
    try:
        for session in sessions:
            session.gradients.arrive()
        found = [session.gradients.census(scaler, note) for session in sessions]
        factor = None if scaler.is_identity else note.scale.reciprocal()
        for session in sessions:
            session.gradients.merge(factor)
    except BaseException:
        for session in sessions:
            session.gradients.undo()
        raise
    for session in sessions:
        session.commit(factor, is_reduced=is_reduced)
    pairs = [(s, flag) for s, flag in zip(sessions, found, strict=True) if flag is not None]
    flags = [session.unheard(flag) for session, flag in pairs]
    for _, found_inf in pairs:
        for session in sessions:
            session.remember(found_inf, note)
    return functools.reduce(torch.maximum, flags) if flags else None


def clip_grad_norm_(
    optimizer: torch.optim.Optimizer, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Clip the unscaled gradients of everything ``optimizer`` updates, as one vector.

    ``factor = min(1, max_norm / (norm + 1e-6))``, the formula of
    ``torch.nn.utils.clip_grad_norm_``. Half gradients are not touched: the factor joins the one
    that unscales them. Writes to gradients through ``grad.data`` leave no trace in torch, and may
    be missing in the norm; write to ``grad`` itself.

    Args:
        optimizer: An optimizer given to ``preamp.initialize``.
        max_norm: Largest norm that stays as it is.
        norm_type: 2 for the Euclidean norm; any other, ``inf`` included, makes float32 gradients
            of the half ones first.

    Returns:
        float32 scalar tensor: the norm before clipping. Infinite or nan after an overflow, when
        the coming ``step`` is skipped.

    Raises:
        PreampStateError: The optimizer has no engine, or its gradients are still scaled.

    Mutates:
        Gradients. Synchronises with the device: never.
    """
    engine = engine_of(optimizer)
    session = engine.sessions[id(bare(optimizer))]
    if session.gradients.is_open:
        raise refusals.inside_block("clip_grad_norm_")
    if session.gradients.stage is Stage.SCALED:
        raise bad_state(
            "clip_grad_norm_ was called on gradients left scaled by delay_unscale=True",
            "Only unscaled gradients have a norm that means anything",
            "Clip after the last scale_loss of the accumulation, called without delay_unscale",
        )
    books, ops, splits = session.gradients, engine.ops, engine.reductions.splits
    made, owners = books.made_gradients(all_of_them=norm_type != 2.0)
    lazy = [(table, *table.pending()) for table in books.tables]
    if norm_type == 2.0:
        norm = books.known_norm.take(books.marks)
        if norm is None:
            grads, factors = made.copy(), [None] * len(made)
            for _, _, halves, half_grads, own in lazy:
                owners += halves
                grads += half_grads
                factors += own
            if splits.given or has_sharded(owners) or torch.float64 in kinds_of(dtype_of, made):
                norm = total_norm(ops, grads, factors, owners, splits, engine.device).float()
            else:
                norm = ops.l2norm(grads, factors, engine.device)
        for tell in engine.events.norm_taken:
            tell(session, norm)
    else:
        norm = norm_of_order(made, norm_type, owners, splits, engine.device)
    clip = (max_norm / (norm + _EPS)).clamp(max=1.0)
    with torch.no_grad():
        if made:
            ops.scale_add_(made, clip, [None] * len(made))
    for table, rows, *_ in lazy:
        table.replace_factors(rows, clip)
    return norm


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside a `LARC`; anything else as it is."""
    return optimizer.optim if isinstance(optimizer, LARC) else optimizer


def find_engine(thing: Any) -> Engine | None:
    """Return the open engine of a model or optimizer, or ``None``.

    A model wrapped in DistributedDataParallel, DataParallel or ``torch.compile`` is looked into,
    and so is `LARC`.
    """
    thing = bare(thing)
    own: dict[str, Any] = getattr(thing, "__dict__", {})
    if isinstance(own.get(ATTRIBUTE), Link):
        target = cast("Link[object]", own[ATTRIBUTE]).target
        if isinstance(target, Engine):
            return target
    modules: dict[str, Any] = own.get("_modules", {})
    for name in _WRAPPED_IN:
        if modules.get(name) is not None:
            return find_engine(modules[name])
    return None


def engine_of(thing: Any) -> Engine:
    """Return the engine that ``preamp.initialize`` made for a model or an optimizer.

    Args:
        thing: A model or optimizer given to ``initialize``; wrappers are looked through.

    Raises:
        PreampStateError: It has none: it never had, or its engine was closed.
    """
    engine = find_engine(thing)
    if engine is None:
        raise bad_state(
            f"This {type(thing).__name__} has no engine",
            "Models and optimizers have one from preamp.initialize until Engine.close",
            "Pass it to preamp.initialize first, and keep the same object",
        )
    return engine


def as_optimizers(optimizers: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list, a single one too; those in a `LARC` are taken out."""
    if isinstance(optimizers, torch.optim.Optimizer) or not isinstance(optimizers, Iterable):
        return [bare(optimizers)]
    members = [bare(optimizer) for optimizer in cast("Iterable[Any]", optimizers)]
    if not members:
        raise bad_state(
            "scale_loss was given no optimizer",
            "It needs every optimizer whose parameters get gradient from the loss",
            "Pass the optimizer that preamp.initialize returned, or a list of them",
        )
    return members


def common_engine(optimizers: Sequence[Any]) -> Engine:
    """Return the one engine that owns all ``optimizers``."""
    engines = [find_engine(optimizer) for optimizer in optimizers]
    first = engines[0]
    for optimizer, engine in zip(optimizers, engines, strict=True):
        if engine is None:
            raise bad_state(
                f"scale_loss was given a {type(optimizer).__name__} that was not initialized",
                "It takes optimizers that went through preamp.initialize",
                "Call model, optimizer = preamp.initialize(model, optimizer, opt_level=…) "
                "before the training loop",
            )
        if engine is not first:
            raise bad_state(
                "scale_loss was given optimizers of different engines",
                "One backward has one loss scale, so its optimizers must come from one "
                "preamp.initialize call",
                "Initialize them together: preamp.initialize([model_a, model_b], "
                "[optimizer_a, optimizer_b], …)",
            )
    if first is None:  # unreachable: the loop above has raised
        raise PreampStateError("no engine")
    return first


def check_loss(loss: Any) -> None:
    """Raise `TypeError` unless ``loss`` is a real floating-point tensor."""
    if isinstance(loss, torch.Tensor) and loss.is_floating_point():
        return
    got = f"a {loss.dtype} tensor" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
    raise bad_type(
        f"scale_loss was given {got} as the loss",
        "The loss must be a floating-point tensor",
        "Pass the tensor that backward() will be called on, not loss.item() or a tuple",
    )


# -- what resumes a run, addressed by what belongs to the engine ----------------------------------


def _owner_of(thing: Any) -> Engine:
    return thing if isinstance(thing, Engine) else engine_of(thing)


def state_dict(of: Engine | torch.optim.Optimizer | torch.nn.Module) -> dict[str, Any]:
    """Return loss scales and step counters of an engine as plain data.

    Together with the models' and optimizers' own ``state_dict`` this resumes training bitwise;
    masters are in the models' (float32, exact). Loads with ``torch.load(weights_only=True)``.

    Args:
        of: The engine, or an optimizer or model given to ``preamp.initialize``.

    Raises:
        PreampStateError: ``of`` has no engine.
    """
    return _owner_of(of).state_dict()


def load_state_dict(
    of: Engine | torch.optim.Optimizer | torch.nn.Module, state: Mapping[str, Any]
) -> None:
    """Take over what `state_dict` returned, or what Apex's ``amp.state_dict()`` did.

    Args:
        of: The engine, or an optimizer or model given to ``preamp.initialize``.
        state: Plain data.

    Raises:
        PreampStateError: ``of`` has no engine.
        ValueError: Scalers are missing, left over or unreadable; nothing was applied.
    """
    _owner_of(of).load_state_dict(state)
