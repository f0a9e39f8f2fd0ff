# SPDX-License-Identifier: BSD-3-Clause
"""What a training loop calls: ``scale_loss``, ``clip_grad_norm_``, ``state_dict``."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from preamp.casting import settle_thread
from preamp.core.errors import PreampStateError, bad_state, bad_type, with_article
from preamp.core.link import ATTRIBUTE, Link
from preamp.core.ranks import has_process_group
from preamp.core.splits import Splits
from preamp.core.tensors import all_finite, dtype_of, has_sharded, host_reaches, kinds_of
from preamp.core.undo import Step, UndoStack
from preamp.engine import refusals
from preamp.engine.engine import Engine, engines_in_use
from preamp.engine.order import kept_long, released
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import NO_ANSWER, REDUCED
from preamp.engine.session import OptimizerSession, Plan, Stage
from preamp.kernels import Ops
from preamp.optim import LARC, WeightTable, leaves_of
from preamp.optim.rank_norms import norm_of_order, total_norm
from preamp.scaling import LossScaler

# DistributedDataParallel and DataParallel; torch.compile; Fabric
_WRAPPED_IN = ("module", "_orig_mod", "_forward_module")
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
    if delay_unscale and engine.policy.storage.release_gradients:
        raise refusals.needs_gradients("scale_loss(delay_unscale=True)")
    check_loss(loss)
    block = Block(engine, members, loss, loss_id)
    delays = delay_unscale and not block.is_plain
    try:
        block.begin(will_delay=delays)
        yield block.scale(loss)
        if delays:
            block.delay()
        else:
            block.finish(adjust=not (delay_overflow_check or block.is_plain))
    except BaseException:
        block.abort()
        raise


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
        self._generation = self.scaler.generation
        self.note = GradientNote(
            loss_id=loss_id, loss_finite=all_finite(loss.detach()), scale=self.scaler.scale.clone()
        )
        # Whose graph tells which gradient was made first
        self.backward_of: torch.Tensor | None = loss
        self._engine = engine
        self._hooks: list[RemovableHandle] = []
        self.reached: set[str] = set()  # by the body's backwards: the loss, what was yielded
        self.begun: list[OptimizerSession] = []  # whose earlier gradients are aside
        self._is_unscaling = False
        self._end: UndoStack | None = None  # what is left to do, once that is decided
        self._reaction: Callable[[], None] | None = None  # of the loss scale
        self._has_ranks = has_process_group()
        self._answers = engine.reductions.begin_block() if self._has_ranks else NO_ANSWER

    @property
    def is_plain(self) -> bool:
        """Whether gradients are unscaled as they come, and nothing is to be done but to add."""
        if not self.scaler.is_identity or self._engine.policy.master_weights:
            return False
        return not any([s.gradients.stage is Stage.SCALED for s in self.sessions])

    def begin(self, *, will_delay: bool) -> None:
        """Set earlier gradients aside; takes itself back if it fails."""
        self._engine.block_begins()
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
        may_reduce = True in self._answers
        plan = Plan(self.scaler, will_delay=will_delay, may_reduce=may_reduce)
        claimed: set[int] = set()
        for session in self.sessions:  # before any sets gradients aside that another one shares
            session.settle(plan, claimed, self._engine.adjustments)
        claimed = set()
        try:
            for session in self.sessions:
                self.begun.append(session)
                session.begin_backward(plan, claimed)
                if session.gradients.delayed is not None:
                    self.note.go_on_from(session.gradients.delayed.note)
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

    def _check_backward(self) -> None:
        """Refuse gradients of the loss itself, which nobody scaled; restore the earlier ones."""
        if self.reached != {"loss"}:
            return  # so it is where a `GradScaler` scales, too
        if any([session.gradients.holds_raw() for session in self.sessions]):
            raise refusals.backward_of_loss()

    def _end_body(self) -> None:
        if self.backward_of is not None:
            self.note.graphs.append(self.backward_of.grad_fn)
        self._remove_hooks()
        self._check_backward()
        for session in self.sessions:
            session.gradients.end_body()

    def _conclude(self, steps: Sequence[Step]) -> None:
        """Let ``steps`` be what is left to do, and do it."""
        self._end = UndoStack.of(steps)
        for session in self.begun:
            session.ending = self._end
        self._end.unwind()

    def abort(self) -> None:
        """Drop what came and put earlier gradients back; or go on with an end that has begun."""
        if self._end is not None:
            self._end.unwind()
            return
        books = [session.gradients for session in self.begun]
        steps: list[Step] = [self._remove_hooks]
        steps += [one.undo if self._is_unscaling else one.abort for one in books]
        if books:
            steps += [self._end_ranks, self._follow_unreduced]
        self._conclude(steps)

    def delay(self) -> None:
        """End it and leave gradients scaled."""
        try:
            self._end_body()
            self.note.graphs = kept_long(self.note.graphs)
            books = [session.gradients for session in self.sessions]
            delays = [partial(b.delay, self.scaler, self.note, self._generation) for b in books]
            tells = [partial(tell, self, True) for tell in self._engine.events.gradients_made]
            self._conclude([self._follow_unreduced, *delays, *tells, self._end_ranks])
        except BaseException:
            self.abort()
            raise

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
                tell(self, False)
            answers = self._answers
            if answers == REDUCED:  # forwards inside the block were not known when it began
                answers = self._engine.reductions.begin_block()
            self._is_unscaling = True
            steps, found_inf = unscale(
                self.sessions, self.scaler, self.note, is_reduced=answers == REDUCED
            )
            tells = [partial(tell, self) for tell in self._engine.events.block_over]
            hear = partial(self._hear, found_inf, record or self.scaler.record, False in answers)
            self._conclude(
                [*steps, self._end_ranks, *tells, self._look, partial(hear, adjust=adjust)]
            )
        except BaseException:
            self.abort()
            raise

    def _look(self) -> None:
        if not self.scaler.is_dynamic:
            finite = self.note.loss_finite
            self._engine.ledger.look("the loss", self.loss.device, lambda: finite)

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


def unscale(
    sessions: Sequence[OptimizerSession],
    scaler: LossScaler,
    note: GradientNote,
    *,
    is_reduced: bool = False,
) -> tuple[list[Step], torch.Tensor | None]:
    """Look for overflow, unscale, add earlier gradients; return what commits that for good.

    Whoever refuses, runs out of memory or is interrupted before has to `GradientBooks.undo`, and
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
        session.gradients.arrive()
    found = [s.gradients.census(scaler, own) for s, own in zip(sessions, notes, strict=True)]
    factor = None if scaler.is_identity else note.scale.reciprocal()
    for session in sessions:
        session.gradients.merge(factor)
    steps: list[Step] = [partial(s.commit, factor, is_reduced=is_reduced) for s in sessions]
    for session, own in zip(sessions, notes, strict=True):
        if own.watched is not None and not scaler.is_dynamic:
            own.graphs = released(own.graphs)
            steps.append(partial(session.remember_watched, own))
    pairs = [(s, flag) for s, flag in zip(sessions, found, strict=True) if flag is not None]
    flags = [session.unheard(flag) for session, flag in pairs]
    for _, found_inf in pairs:
        steps += [partial(session.remember, found_inf, note) for session in sessions]
    return steps, functools.reduce(torch.maximum, flags) if flags else None


def clip_grad_norm_(
    parameters: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip unscaled gradients, as one vector: those of an optimizer, or of parameters.

    ``factor = min(1, max_norm / (norm + 1e-6))``, the formula of
    ``torch.nn.utils.clip_grad_norm_``. Half gradients are not touched: the factor joins the one
    that unscales them. Writes to gradients through ``grad.data`` leave no trace in torch, and may
    be missing in the norm; write to ``grad`` itself.

    Args:
        parameters: An optimizer given to ``preamp.initialize``, for everything that it updates;
            or, as in torch, parameters of models of one such call: an iterable of them or a single
            one, half ones or masters. Those without a gradient are passed over. What an optimizer
            has besides stays as it is.
        max_norm: Largest norm that stays as it is.
        norm_type: 2 for the Euclidean norm; any other, ``inf`` included, makes float32 gradients
            of the half ones first.
        error_if_nonfinite: Raise where the norm is infinite or nan, as after an overflow.
        foreach: Ignored; torch has it.

    Returns:
        float32 scalar tensor: the norm before clipping. Infinite or nan after an overflow, when
        the coming ``step`` is skipped.

    Raises:
        PreampStateError: The optimizer has no engine, parameters with gradients have none or
            several, no optimizer updates them, or gradients are still scaled, or released.
        TypeError: ``parameters`` is neither.
        RuntimeError: The norm is not finite, and ``error_if_nonfinite``; nothing was clipped.

    Mutates:
        Gradients. Synchronises with the device: never, but for ``error_if_nonfinite``.
    """
    del foreach
    engine, sessions, only = _to_clip(parameters)
    if engine.policy.storage.release_gradients:
        raise refusals.needs_gradients("clip_grad_norm_")
    for session in sessions:
        _check_can_clip(session)
    is_euclidean = norm_type == 2.0
    found = _gradients_of(sessions, only, all_made=not is_euclidean)
    norm = None
    if is_euclidean and only is None:
        books = sessions[0].gradients
        norm = books.known_norm.take(books.marks)
    if norm is None:
        norm = found.norm(engine, norm_type)
    if not any([scaler.is_dynamic for scaler in engine.scalers]):
        engine.ledger.look("the norm of the gradients", norm.device, partial(all_finite, norm))
    if is_euclidean and only is None:
        for tell in engine.events.norm_taken:
            tell(sessions[0], norm)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(
            f"The norm of order {norm_type} of the gradients is {norm.item()}, so it cannot be "
            "clipped. Pass error_if_nonfinite=False, and the coming step is skipped."
        )
    # A norm on the host that is below the bound, by more than rounding, needs no factor.
    if not (host_reaches(norm) and norm.item() < 0.999 * (max_norm - _EPS)):
        found.multiply_(engine.ops, (max_norm / (norm + _EPS)).clamp(max=1.0))
    return norm


def _check_can_clip(session: OptimizerSession) -> None:
    session.end_left_open()
    session.take_in_shown()
    if session.gradients.is_open:
        raise refusals.inside_block("clip_grad_norm_")
    if session.gradients.stage is Stage.SCALED:
        raise bad_state(
            "clip_grad_norm_ was called on gradients left scaled by delay_unscale=True",
            "Only unscaled gradients have a norm that means anything",
            "Clip after the last scale_loss of the accumulation, called without delay_unscale",
        )


def _to_clip(given: Any) -> tuple[Engine, list[OptimizerSession], frozenset[int] | None]:
    """The engine, the optimizers, and the ``id`` of the model's parameters, if not all of one."""
    if isinstance(given, torch.Tensor):
        params = [given]
    elif is_optimizer(given) or not isinstance(given, Iterable):
        engine = engine_of(given)
        session = engine.sessions.get(id(bare(given)))
        if session is None:
            raise _not_to_clip(given)
        return engine, [session], None
    else:
        params = list(cast("Iterable[Any]", given))
        for param in params:
            if not isinstance(param, torch.Tensor):
                raise _not_to_clip(param)
    leaves = {id(leaf): leaf for leaf in leaves_of(params)}
    engine = _engine_with(leaves)
    owned = {id(s): frozenset(map(id, s.model_params())) for s in engine.sessions.values()}
    sessions = [s for s in engine.sessions.values() if not owned[id(s)].isdisjoint(leaves)]
    if len(sessions) == 1 and owned[id(sessions[0])].issubset(leaves):
        return engine, sessions, None
    return engine, sessions, frozenset(leaves)


def _not_to_clip(given: Any) -> TypeError:
    return bad_type(
        f"clip_grad_norm_ was given {with_article(type(given).__name__)}",
        "It takes one optimizer, parameters, or a single tensor",
        "Pass the optimizer that preamp.initialize returned, or model.parameters()",
    )


def _engine_with(leaves: Mapping[int, torch.Tensor]) -> Engine:
    """The one engine whose optimizers update what has a gradient."""
    needed = {key for key, leaf in leaves.items() if leaf.grad is not None}
    every = [(engine, _updated_leaves(engine)) for engine in engines_in_use()]
    having = [engine for engine, own in every if not own.isdisjoint(leaves)]
    whole = [engine for engine, own in every if needed <= own and engine in having]
    if len(whole) > 1:  # one that the model has left, or that waits for the garbage collector
        whole = [e for e in whole if any(find_engine(model) is e for model in e.own_models)]
    if len(whole) == 1:
        return whole[0]
    if len(having) > 1:
        got = "parameters of several engines"
        do = "Call it once for each optimizer: preamp.clip_grad_norm_(optimizer, max_norm)"
    elif leaves:
        which = "parameters, some of which" if having else "parameters that"
        got = f"{which} no optimizer given to preamp.initialize updates"
        do = "Pass the optimizer, or only parameters that it updates"
    else:
        got = "no parameters"
        do = "Pass the optimizer, or a list: a generator can be read only once"
    raise bad_state(
        f"clip_grad_norm_ was given {got}",
        "A norm is taken of gradients that the optimizers of one preamp.initialize unscale",
        do,
    )


def _updated_leaves(engine: Engine) -> frozenset[int]:
    sessions = engine.sessions.values()
    return frozenset(id(leaf) for session in sessions for leaf in session.model_params())


@dataclass(frozen=True, slots=True)
class _Gradients:
    """What is clipped together."""

    made: list[Any]  # gradients that lie in memory as they are
    lazy: list[tuple[WeightTable, list[int]]]  # rows of half gradients, yet to be unscaled
    halves: list[Any]  # these
    factors: list[Any]  # what unscales them
    owners: list[torch.Tensor]  # the model's parameters, of the made ones and then of the others
    splits: Splits

    def norm(self, engine: Engine, order: float) -> torch.Tensor:
        """The norm of all, unscaled: a float32 scalar."""
        made, splits, device = self.made, self.splits, engine.device
        if order != 2.0:
            return norm_of_order(made, order, self.owners, splits, device).float()
        grads, factors = made + self.halves, [None] * len(made) + self.factors
        if splits.given or has_sharded(self.owners) or torch.float64 in kinds_of(dtype_of, made):
            return total_norm(engine.ops, grads, factors, self.owners, splits, device).float()
        return engine.ops.l2norm(grads, factors, device)

    @torch.no_grad()
    def multiply_(self, ops: Ops, factor: torch.Tensor) -> None:
        if self.made:
            ops.scale_add_(self.made, factor, [None] * len(self.made))
        for table, rows in self.lazy:
            table.replace_factors(rows, factor)
            if table.is_showing:
                table.show()


def _gradients_of(
    sessions: Sequence[OptimizerSession], only: frozenset[int] | None, *, all_made: bool
) -> _Gradients:
    """The gradients of all that ``sessions`` update, or of parameters whose ``id`` is in it."""
    found = _Gradients([], [], [], [], [], sessions[0].gradients.splits)
    tables: dict[int, WeightTable] = {}
    for session in sessions:  # before any is asked for what is not made yet
        made, owners = session.gradients.made_gradients(all_of_them=all_made)
        if only is not None:  # of a weight in two optimizers both tell the same
            own = {*map(id, found.owners)}
            pairs = zip(made, owners, strict=True)
            pairs = [(g, p) for g, p in pairs if id(p) in only and id(p) not in own]
            made, owners = [grad for grad, _ in pairs], [param for _, param in pairs]
        found.made.extend(made)
        found.owners.extend(owners)
        tables.update((id(table), table) for table in session.gradients.tables)
    for table in tables.values():
        rows, halves, grads, factors = table.pending()
        if only is not None:
            places = [place for place, half in enumerate(halves) if id(half) in only]
            rows, halves = [rows[i] for i in places], [halves[i] for i in places]
            grads, factors = [grads[i] for i in places], [factors[i] for i in places]
        found.lazy.append((table, rows))
        found.halves.extend(grads)
        found.factors.extend(factors)
        found.owners.extend(halves)
    return found


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside a `LARC` or a framework's wrapper; anything else as it is."""
    inner = _inside(optimizer)
    return optimizer if inner is None else bare(inner)


def _inside(optimizer: Any) -> torch.optim.Optimizer | None:
    """The optimizer that ``optimizer`` forwards to, groups and state being the very same objects.

    So do the wrappers of Accelerate, Lightning and Fabric. One with state of its own, as Lookahead
    has, is an optimizer by itself; one that tells of its ``overflow`` scales by itself.
    """
    if isinstance(optimizer, LARC):
        return optimizer.optim
    inner = getattr(optimizer, "optimizer", None)
    if not isinstance(inner, torch.optim.Optimizer) or hasattr(optimizer, "overflow"):
        return None
    groups, state = inner.param_groups, inner.state
    is_same = getattr(optimizer, "param_groups", None) is groups
    return inner if is_same and getattr(optimizer, "state", state) is state else None


def is_optimizer(thing: Any) -> bool:
    """Whether it is an optimizer, or a wrapper that `bare` looks through."""
    return isinstance(bare(thing), torch.optim.Optimizer)


def find_engine(thing: Any) -> Engine | None:
    """Return the open engine of a model or optimizer, or ``None``.

    A model wrapped in DistributedDataParallel, DataParallel or ``torch.compile`` is looked into,
    and so are `LARC` and what frameworks wrap optimizers in.
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


def as_optimizers(optimizers: Any, who: str = "scale_loss") -> list[torch.optim.Optimizer]:
    """Return the optimizers as a list, a single one too; wrapped ones are taken out."""
    single = bare(optimizers)
    if isinstance(single, torch.optim.Optimizer) or not isinstance(optimizers, Iterable):
        return [single]
    members = [bare(optimizer) for optimizer in cast("Iterable[Any]", optimizers)]
    if not members:
        raise bad_state(
            f"{who} was given no optimizer",
            "It needs every optimizer whose parameters get gradient from the loss",
            "Pass the optimizer that preamp.initialize returned, or a list of them",
        )
    return members


def common_engine(
    optimizers: Sequence[Any], who: str = "scale_loss", initialize: str = "preamp.initialize"
) -> Engine:
    """Return the one engine that owns all ``optimizers``, which ``who`` was given.

    ``initialize`` is the name by which the script knows it, for the errors.
    """
    engines = [find_engine(optimizer) for optimizer in optimizers]
    first = engines[0]
    for optimizer, engine in zip(optimizers, engines, strict=True):
        if engine is None:
            raise bad_state(
                f"{who} was given {with_article(type(optimizer).__name__)} that was not "
                "initialized",
                f"It takes optimizers that went through {initialize}",
                f"Call model, optimizer = {initialize}(model, optimizer, opt_level=…) "
                "before the training loop",
            )
        if engine is not first:
            raise bad_state(
                f"{who} was given optimizers of different engines",
                "One backward has one loss scale, so its optimizers must come from one "
                f"{initialize} call",
                f"Initialize them together: {initialize}([model_a, model_b], "
                "[optimizer_a, optimizer_b], …)",
            )
    if first is None:  # unreachable: the loop above has raised
        raise PreampStateError("no engine")
    return first


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
