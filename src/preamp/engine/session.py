# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer in an engine: its gradients, its masters, what was found, and its counters.

Blocks and hooks talk to it. It follows the gradients through a backward: set aside, scaled, merged
and unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any, cast

import torch
from torch.utils.hooks import RemovableHandle

from preamp.core.ranks import has_process_group
from preamp.core.tensors import (
    are_same,
    grad_of,
    has_sharded,
    host_reaches,
    is_capturing,
    is_sharded,
    versions_of,
    with_gradients,
)
from preamp.core.torch_private.shards import place_gradients
from preamp.core.undo import Step, UndoStack, all_or_nothing
from preamp.engine import refusals
from preamp.engine.joint_findings import of_all_ranks
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import Reductions
from preamp.kernels import Census, Ops
from preamp.optim import (
    DirectGradients,
    HalfGradients,
    Masters,
    Rewriting,
    WeightTable,
    cast_state,
    is_zeroed,
    leaves_of,
    without_masters,
)
from preamp.optim.fused.keeping import KeepsMoments
from preamp.policy.storage import Storage
from preamp.scaling import LossScaler
from preamp.scaling.scaler import Adjustments, larger

NameOf = Callable[[torch.Tensor], str]
_NOTES_KEPT = 256  # backwards between two steps that an overflow message can still look back on


class Stage(Enum):
    """Where an optimizer's gradients stand."""

    READY = "ready"
    SCALED = "scaled"
    UNSCALED = "unscaled"


@dataclass(frozen=True, slots=True)
class Plan:
    """What a ``scale_loss`` block is going to do with the gradients of its backward."""

    scaler: LossScaler
    will_delay: bool = False  # leave them scaled (``delay_unscale``)
    may_reduce: bool = False  # a hook may reduce them over ranks


@dataclass(slots=True)
class Delayed:
    """The scale that gradients left scaled (``delay_unscale``) carry."""

    scaler: LossScaler
    generation: int  # the scaler's generation then; another one means another scale
    # What unscales them, a float32 scalar; ``None`` for the static scale 1
    inverse: torch.Tensor | None
    note: GradientNote  # of the latest backward that left any, and of those before it
    has_gradients: bool = False  # whether any gradient was left
    # Of the gradients left, by the ``id`` of their parameters
    versions: dict[int, int] = field(default_factory=dict[int, int])

    def continues_with(self, scaler: LossScaler) -> bool:
        """Whether gradients of ``scaler`` can be added as they are."""
        return self.scaler is scaler and self.generation == scaler.generation


Marks = tuple[list[int], list[Any], list[int]]
"""By what to tell gradients: changes of the table, gradients without masters, their versions."""


class KnownNorm:
    """The norm that a census took along, for as long as the gradients stay what they were.

    Spares clipping a pass over them. It is of the scaled gradients, before they are unscaled. A
    factor that is a power of two, as loss scales are, makes no difference to when it is applied.
    """

    def __init__(self) -> None:
        """Know nothing."""
        self._norm: torch.Tensor | None = None
        self._grads: Sequence[torch.Tensor] = ()
        self._marks: Marks | None = None
        self._clips = False
        self._clipped = False

    @property
    def is_wanted(self) -> bool:
        """Whether the script has clipped in this step or in the latest one."""
        return self._clips or self._clipped

    @property
    def is_of_sharded(self) -> bool:
        """Whether it is of sharded gradients, which were reduced when they were sharded."""
        return bool(self._grads) and all(map(is_sharded, self._grads))

    def note(self, norm: torch.Tensor, grads: Sequence[torch.Tensor]) -> None:
        """Note the norm of all of ``grads``, still scaled; of no use before `commit`."""
        self._norm, self._grads = norm, grads

    def commit(
        self, factor: torch.Tensor | None, marks: Callable[[], Marks], *, is_reduced: bool
    ) -> None:
        """The gradients have been unscaled by ``factor``, or will be where they are used.

        ``marks()`` tells later whether they are still the same.
        """
        if self._norm is None or self._marks is not None:  # it may be called again
            return
        if not _is_sound(self._norm, self._grads) or (has_process_group() and not is_reduced):
            # The script may reduce them from now on, and torch.distributed leaves versions alone.
            self.forget()
            return
        norm = self._norm if factor is None else self._norm * factor.to(self._norm.device)
        self._norm, self._grads, self._marks = norm, (), marks()

    def forget(self) -> None:
        """The gradients are going, or will be others; hold none of them any longer."""
        self._norm = self._marks = None
        self._grads = ()

    def end_step(self) -> None:
        """A step has used the gradients up."""
        self.forget()
        self._clipped, self._clips = self._clips, False

    def take(self, marks: Callable[[], Marks]) -> torch.Tensor | None:
        """The norm of the gradients as they are, if it is known; they will be clipped by it."""
        self._clips = True
        norm, known = self._norm, self._marks
        self.forget()  # clipped gradients have another
        if norm is None or known is None:
            return None
        now = marks()
        is_same = known[0] == now[0] and known[2] == now[2] and are_same(known[1], now[1])
        return norm if is_same else None

    def resume(self, *, clips: bool) -> None:
        """Go on where another process has stopped that clipped in its last step, or did not."""
        self.forget()
        self._clips, self._clipped = False, clips


def _is_sound(norm: torch.Tensor, grads: Sequence[torch.Tensor]) -> bool:
    """Whether the squares of scaled gradients cannot have overflowed; float16 ones cannot."""
    if host_reaches(norm):
        return bool(torch.isfinite(norm))
    return all(grad.dtype is torch.float16 for grad in grads)


class OptimizerSession:
    """One optimizer of an engine: its gradients, its masters, and what was found in them.

    Gradients go READY → SCALED → UNSCALED → READY. A block is `begin_backward`, then `abort`,
    `delay`, or `census`, `merge` and `commit`. Nothing is lost before `commit`: each of the others
    may fail and be followed by `abort` or `undo`. What ends a block (`abort`, `undo`, `delay`,
    `commit`) may be called again, where it was interrupted and where it was not.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ops: Ops,
        masters: Masters | None,
        reductions: Reductions,
    ) -> None:
        """Take over the bookkeeping of ``optimizer``; makes no masters yet."""
        self.optimizer = optimizer
        self.masters = masters  # its float32 masters, or ``None`` at levels without
        self.stage = Stage.READY
        self.is_open = False  # whether a ``scale_loss`` block is under way
        self.direct = DirectGradients(ops)  # gradients of parameters without a master
        self.delayed: Delayed | None = None  # of gradients left scaled, if there are any
        self.known_norm = KnownNorm()  # what a census found, if clipping wants it
        # Not zero if the next step must be skipped; ``None`` if nobody looked
        self.found_inf: torch.Tensor | None = None
        self.heard: torch.Tensor | None = None  # an overflow that the loss scale knows of
        # What the backwards since the last step found, for overflow messages
        self.notes: list[GradientNote] = []
        # The same where nobody acts on it, but the modules are watched
        self.watched: list[GradientNote] = []
        self.backwards = 0
        self.steps_applied = 0  # steps that updated the weights
        self.steps_skipped = 0  # steps not taken because of overflow
        self.skips_in_row = 0  # skipped steps since the last applied one
        # Ends a backward that a `GradScaler` has left open; ``None`` if none is
        self.end_backward: Callable[[], None] | None = None
        self.ending = UndoStack()  # what an interrupt has left of the end of a block
        # Hooks of one that let a backward raise, since what it has unscaled must stay in place
        self.refusing: list[RemovableHandle] = []
        self.splits = reductions.splits
        self._reductions = reductions
        self._reduced_at = reductions.unreduced
        self._ops = ops
        self._params: list[torch.Tensor] = []  # of which the two lists below are
        self._leaves: list[torch.Tensor] = []
        self._direct_params: list[torch.Tensor] = []
        self._has_claimed = False  # whether another optimizer of the block has some of them

    # -- parameters --------------------------------------------------------------------------

    def params(self) -> list[torch.Tensor]:
        """What the optimizer updates."""
        groups = self.optimizer.param_groups
        if len(groups) == 1:
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def model_params(self) -> list[torch.Tensor]:
        """The model's parameters that the optimizer updates, half ones in their masters' places."""
        params = self.params()
        if not are_same(params, self._params):
            self._params, self._leaves = params.copy(), leaves_of(params)
            self._direct_params = without_masters(params)
        return self._leaves

    def direct_params(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates without a master."""
        self.model_params()
        return self._direct_params

    @property
    def tables(self) -> list[WeightTable]:
        """Of the half parameters that have masters."""
        return [] if self.masters is None else self.masters.tables

    @property
    def half_gradients(self) -> list[HalfGradients]:
        """The gradients of their rows."""
        return [table.gradients for table in self.tables]

    @property
    def gradients(self) -> list[DirectGradients | HalfGradients]:
        """All, each kind with the same acts in a backward."""
        return [self.direct, *self.half_gradients]

    def check_can_share(self) -> None:
        """Raise `PreampStateError` where a weight cannot go into another optimizer as well."""
        self.end_left_open()
        if self.is_open or self.stage is Stage.SCALED:
            raise refusals.shared_while_scaled()

    def take_findings(self, other: OptimizerSession) -> None:
        """Take over what was found in gradients that this optimizer now shares with another."""
        if other.found_inf is not None:
            self.found_inf = larger(other.found_inf, self.found_inf)
            own = set(map(id, self.notes))
            self.notes += [note for note in other.notes if id(note) not in own]

    def release_masters(self) -> None:
        """Give the optimizer its half parameters back, and hold no parameters any more."""
        if self.masters is not None:
            self.masters.release()
        self._params, self._leaves, self._direct_params, self.direct.params = [], [], [], []

    def recast_state(self, undo: UndoStack | None = None) -> None:
        """Bring the optimizer's state to the dtype of its parameters, after these changed.

        That of a fused optimizer goes where its storage says.

        In place: ``optimizer.load_state_dict`` would replace the group dicts that schedulers hold.
        ``undo`` gets what brings the very tensors back.
        """
        state: dict[Any, Any] = self.optimizer.state
        for param in self.params():
            if param in state and isinstance(state[param], dict):
                if undo is not None:
                    undo.push(partial(state[param].update, state[param].copy()))
                cast_state(state[param], param)
        if isinstance(self.optimizer, KeepsMoments):
            self.optimizer.place_state()

    def compare_weights(self) -> None:
        """Weights may have been written to without a trace; look at the next backward."""
        for table in self.tables:
            table.make()
            table.compares = True

    def _compare_now(self) -> None:
        for table in self.tables:
            if table.compares:  # mostly not, and who reduces is a walk over all modules
                table.compare(rounds=self._reductions.are_by_hand)

    def adopt(self, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        """Make masters for half parameters that lack one; see `Masters.adopt`."""
        if self.masters is not None:
            self.masters.adopt(originals)

    # -- a backward begins -------------------------------------------------------------------

    def refuse_nested(self) -> None:
        """Raise `PreampStateError` if this optimizer is in a ``scale_loss`` block already.

        Both blocks would unscale the same gradients.
        """
        if self.is_open:
            raise refusals.nested(self.optimizer)

    def settle(self, plan: Plan, claimed: set[int], adjustments: Adjustments) -> None:
        """Unscale gradients left scaled if those of the coming block cannot be added to them."""
        self.adopt()
        self._forget_abandoned()
        if self.found_inf is not None and self._has_lost_delayed():
            self._forget_overflow()
        # What is away could not be reduced with the rest.
        must_return = plan.may_reduce and self.may_be_local and self._has_aside
        continues = self.delayed is None or self.delayed.continues_with(plan.scaler)
        if must_return or not continues:
            self.settle_now(claimed, adjustments)

    def settle_now(self, claimed: set[int], adjustments: Adjustments) -> None:
        """Unscale gradients left scaled, if there are any. Arguments as `settle`."""
        delayed = self.delayed
        if delayed is None:
            self.backwards += 1
            return

        def prepare() -> list[Step]:
            self._reconcile_raw()
            self.direct.params = self._unclaimed(claimed)
            self.arrive()
            self.is_open = True
            found_inf = self.census(delayed.scaler, delayed.note)
            self.merge(delayed.inverse)
            tell = partial(self._tell_settled, delayed, found_inf, adjustments)
            return [partial(self.commit, delayed.inverse), tell]

        all_or_nothing(prepare, self.undo)

    def _tell_settled(
        self, delayed: Delayed, found_inf: torch.Tensor | None, adjustments: Adjustments
    ) -> None:
        if found_inf is None:
            return
        self.remember(found_inf, delayed.note)
        if self.may_be_local:  # other ranks do not know of an overflow here yet
            adjustments.later(delayed.scaler, [self], found_inf, is_due=False)
        else:
            # Of a scale that has fallen since it says nothing new.
            is_news = delayed.scaler.scale >= delayed.note.scale
            delayed.scaler.record(self.new_overflow(found_inf) * is_news)

    def begin_backward(self, plan: Plan, claimed: set[int]) -> None:
        """Make room for a backward. Mutates the parameters' ``grad``.

        ``claimed`` has the ``id`` of parameters handled for another optimizer, and is extended.
        """
        is_first = self.delayed is None  # else raw gradients of one scale pile up in place
        if is_first:
            has_found = self.found_inf is not None or self.watched
            if has_found and not self.holds_any():
                self._forget_overflow()
            # Left scaled, they are joined by earlier ones in place, whose overflow is told.
            self.heard = self.found_inf if plan.will_delay else None
        self.known_norm.forget()
        own = self.direct.params = self._unclaimed(claimed)
        if is_first:
            self._set_aside(plan, own)
        else:
            self._reconcile_raw()
        self.is_open = True

    def _set_aside(self, plan: Plan, own: list[torch.Tensor]) -> None:
        carry: torch.Tensor | float | None = None
        scale = 1.0 if plan.scaler.is_identity else plan.scaler.scale
        if plan.may_reduce and self.may_be_local:
            carry = scale
        for halves in self.half_gradients:
            halves.reconcile()  # may refuse before anything is moved
        self.is_open = True  # for `undo`, which takes back as much as was done
        self.direct.begin(
            own, carry, scale if plan.will_delay else None, may_be_overwritten=plan.may_reduce
        )
        self._compare_now()
        for halves in self.half_gradients:
            halves.begin(carry)

    def _unclaimed(self, claimed: set[int]) -> list[torch.Tensor]:
        own = self.direct_params()
        self._has_claimed = not claimed.isdisjoint(map(id, own))
        if self._has_claimed:
            own = [param for param in own if id(param) not in claimed]
        claimed.update(map(id, own))
        return own

    def _reconcile_raw(self) -> None:
        for some in self.gradients:
            some.reconcile_raw()

    # -- a backward ends ---------------------------------------------------------------------

    def end_body(self) -> None:
        """The body of the block has ended: take in what it dropped."""
        for some in self.gradients:
            some.end_body()

    def abort(self) -> None:
        """The body raised: drop its gradients, restore those from before."""
        if self.is_open and self.delayed is None:
            self.undo()
        # After a delayed block nothing was set aside; what autograd added stays, as in torch.
        self.is_open = False

    def undo(self) -> None:
        """Restore the gradients from before the block, or from before the first delayed one."""
        self.known_norm.forget()
        if self.is_open:
            for some in self.gradients:
                some.put_back()
        if self.delayed is not None:
            self.delayed, self.stage = None, Stage.READY
        self.is_open = False

    def delay(self, scaler: LossScaler, note: GradientNote, generation: int) -> None:
        """Leave the gradients scaled; a later block unscales them all.

        ``generation`` is the scaler's when the block began.
        """
        for some in self.gradients:
            some.note_raw()
        if self.delayed is None:
            inverse = None if scaler.is_identity else note.scale.reciprocal()
            self.delayed = Delayed(scaler, generation, inverse, note)
        self.delayed.has_gradients |= self.holds_raw()
        self.delayed.note, self.stage = note, Stage.SCALED
        self._note_versions(self.delayed)
        self.is_open = False

    def _note_versions(self, delayed: Delayed) -> None:
        leaves = self.model_params()
        versions = versions_of([leaf.grad for leaf in leaves])
        delayed.versions = dict(zip(map(id, leaves), versions, strict=True))

    def arrive(self) -> None:
        """The backward is over: tables read their half gradients, and refuse sparse ones."""
        for halves in self.half_gradients:
            halves.arrive()

    def census(self, scaler: LossScaler, note: GradientNote) -> torch.Tensor | None:
        """Look for overflow; note what is found.

        Returns a float32 scalar on the device, 1.0 if any new gradient is infinite or nan; ``None``
        for static scales: these look only where modules are watched or the loss is not finite.
        """
        leaves = self._leaves
        if self._has_claimed:
            halves = [half for table in self.tables for half in table.halves]
            own = {*map(id, self.direct.params), *map(id, halves)}
            leaves = [leaf for leaf in leaves if id(leaf) in own]
        if has_sharded(leaves):
            place_gradients(leaves)
        if not scaler.is_dynamic:
            if note.watched is not None or note.is_suspect:
                self.look(leaves, scaler.device, note, is_joint=False)
            return None
        wants_norm = self.known_norm.is_wanted
        grads, census = self.look(leaves, scaler.device, note, with_norm=wants_norm)
        if census.norm is not None and not self.holds_earlier():
            self.known_norm.note(census.norm, grads)
        return census.found_inf

    def look(
        self,
        leaves: list[Any],
        device: torch.device,
        note: GradientNote,
        *,
        with_norm: bool = False,
        is_joint: bool = True,
    ) -> tuple[list[torch.Tensor], Census]:
        """Read the gradients of ``leaves`` once; what all ranks found is returned and noted.

        Unless it ``is_joint`` what this rank has found, who may be the only one to look.
        """
        halves = self.half_gradients
        params = leaves
        grads: Any = halves[0].arrived_of(leaves) if halves else None
        if grads is None or any(map(is_, grads, repeat(None))):
            params, grads = with_gradients(leaves)
        census = self._ops.census(grads, device, with_norm=with_norm, with_max_abs=False)
        if census.max_abs is not None:
            note.add(params, grads, census)
        if is_joint and (has_sharded(leaves) or self.splits.given):
            census = of_all_ranks(census, leaves, params, self.splits)
        note.found_inf.append(census.found_inf)
        return grads, census

    def merge(self, factor: torch.Tensor | None) -> None:
        """Unscale the new gradients by ``factor``, if any, and add the earlier ones."""
        for some in self.gradients:
            some.merge(factor)

    def commit(self, factor: torch.Tensor | None, *, is_reduced: bool = False) -> None:
        """The block ends; ``is_reduced`` is for gradients certainly reduced over ranks."""
        if is_reduced:
            self._reduced_at = self._reductions.unreduced
        for some in self.gradients:
            some.commit(factor)
        is_reduced = is_reduced or self.known_norm.is_of_sharded
        self.known_norm.commit(factor, self.marks, is_reduced=is_reduced)
        self.is_open = False
        self.stage = Stage.UNSCALED
        self.delayed = None
        self.backwards += 1

    # -- gradients between backwards ---------------------------------------------------------

    @property
    def may_be_local(self) -> bool:
        """Whether there may be gradients of this rank alone, not reduced yet."""
        return self._reduced_at != self._reductions.unreduced

    @property
    def _has_aside(self) -> bool:
        """Whether an earlier gradient is away while others were left scaled."""
        return any([some.has_aside for some in self.gradients])

    def holds_earlier(self) -> bool:
        """Whether earlier gradients join those of the backward."""
        return any([some.has_earlier for some in self.gradients])

    def holds_raw(self) -> bool:
        """Whether any gradient lies on the model's side."""
        return any(param.grad is not None for param in self.model_params())

    def holds_any(self) -> bool:
        """Whether gradients from before are left; those that the script zeroed do not count."""
        return self.direct.holds_gradient(self.direct_params()) or any(
            [halves.holds_gradient for halves in self.half_gradients]
        )

    def is_within_step(self) -> bool:
        """Whether gradients of a block wait for their step, neither dropped nor zeroed."""
        if self.stage is Stage.SCALED:
            return self.holds_raw() and not self._has_lost_delayed()
        return self.stage is Stage.UNSCALED and self.holds_any()

    def _has_lost_delayed(self) -> bool:
        """Whether gradients were left scaled, and the script has zeroed or dropped them all.

        Zeros with a sign are none of a script's: they stand in for earlier gradients.
        """
        delayed, leaves = self.delayed, self.model_params()
        if delayed is None or not delayed.versions:
            return False
        grads, then = [leaf.grad for leaf in leaves], [delayed.versions.get(id(p)) for p in leaves]
        return all(
            grad is None or (now != before and not grad.is_sparse and is_zeroed(grad))
            for grad, now, before in zip(grads, versions_of(grads), then, strict=True)
        )

    def _forget_abandoned(self) -> None:
        """Forget a delayed accumulation whose gradients the script has dropped since."""
        delayed = self.delayed
        if delayed is not None and delayed.has_gradients and not self.holds_raw():
            self.drop_gradients()

    def made_gradients(self, *, all_of_them: bool) -> tuple[list[Any], list[torch.Tensor]]:
        """Gradients that are made (now, if ``all_of_them``), and the model's parameters."""
        direct, grads = with_gradients(self.direct_params())
        for table in self.tables:
            halves = table.gradients
            (halves.make_all if all_of_them else halves.make_accumulated)()
            if halves.may_have_bases:
                pairs = zip(table.halves, halves.bases(), strict=True)
                made = [(half, base) for half, base in pairs if base is not None]
                direct += [half for half, _ in made]
                grads += [base for _, base in made]
        return grads, direct

    def marks(self) -> Marks:
        """What differs once gradients are no longer those that the latest backward has left."""
        grads = list(map(grad_of, self._direct_params))
        return [halves.changes for halves in self.half_gradients], grads, versions_of(grads)

    def read_back_shown(self) -> None:
        """Take in what a script did to gradients after ``unscale_``; all ranks call it."""
        for table in self.tables:
            halves = table.gradients
            if not halves.is_showing:
                continue
            if not self.splits.concern(table.halves):
                halves.reconcile(looks=True, lost=self.found_inf)
            elif self.overflowed():
                halves.ignore_writes()
            else:
                halves.reconcile(self.splits.agree, looks=True)

    def fill_with_zeros(self, original: Callable[[], Any]) -> Any:
        """Fill every gradient of this optimizer with zeros, the model's half ones included."""
        self.ending.unwind()
        self.reset()
        self.direct.forget()
        tables = self.half_gradients  # what they have is away, since the optimizer would widen it
        away = [halves.take_away_zeroed(in_backward=self.is_open) for halves in tables]
        try:
            return original()
        finally:
            for halves, grads in zip(tables, away, strict=True):
                halves.give_zeros(grads)

    def drop_gradients(self) -> None:
        """Drop all that masters have, and the model's half ones, and what was set aside."""
        self.ending.unwind()
        self.direct.forget()
        for halves in self.half_gradients:
            halves.drop(in_backward=self.is_open)
        self.reset()

    # -- an overflow -------------------------------------------------------------------------

    def new_overflow(self, found_inf: torch.Tensor) -> torch.Tensor:
        """What the loss scale has yet to learn of ``found_inf``; nothing twice."""
        heard = self.heard
        if heard is None:
            return found_inf
        return found_inf * (heard.to(found_inf.device) == 0)

    def remember(self, found_inf: torch.Tensor, note: GradientNote) -> None:
        """Keep an overflow until the next step, whichever optimizer's gradients showed it."""
        self.found_inf = found_inf = larger(found_inf, self.found_inf)
        # The first backward that overflowed is told; where the host is near, it is known by now.
        if host_reaches(found_inf) and (self.notes or not bool(found_inf != 0)):
            return
        if not self.notes or self.notes[-1] is not note:
            self.notes = [*self.notes[-_NOTES_KEPT + 1 :], note]

    def remember_watched(self, note: GradientNote) -> None:
        """Keep what a backward has found, of which nothing follows, until the next step."""
        if not self.watched or self.watched[-1] is not note:
            self.watched = [*self.watched[-_NOTES_KEPT + 1 :], note]

    def _forget_overflow(self) -> None:
        """The gradients that overflowed were dropped or zeroed: a fresh start."""
        self.found_inf = self.heard = None
        self.notes.clear()
        self.watched.clear()

    def overflowed(self) -> bool:
        """Whether the gradients at hand contain an overflow. Synchronises if any was possible."""
        if self.found_inf is None or self.found_inf.item() != 0:
            return self.found_inf is not None
        self.found_inf = None  # known to be clean: not asked for again
        return False

    def unread_overflow(self) -> torch.Tensor | None:
        """The overflow flag, if the optimizer can obey it on the device and the host is not near.

        torch's protocol for it is the one of its ``GradScaler``; fused optimizers follow it.
        """
        found_inf = self.found_inf
        if found_inf is None or host_reaches(found_inf):
            return None
        return found_inf if self.obeys_on_device else None

    @property
    def obeys_on_device(self) -> bool:
        """Whether the optimizer skips a step by itself where the flag on the device says so."""
        name, optimizer = "_step_supports_amp_scaling", self.optimizer
        # One that forwards every name to an optimizer inside is not told for that one.
        is_own = name in vars(optimizer) or hasattr(type(optimizer), name)
        return is_own and bool(getattr(optimizer, name))

    # -- one step ----------------------------------------------------------------------------

    def end_left_open(self) -> None:
        """Let gradients be unscaled now, if a `GradScaler` would do so later."""
        self.ending.unwind()
        if self.is_open and self.end_backward is not None:
            self.end_backward()

    def accept_backwards(self) -> None:
        """Let them come again: whoever begins one sets earlier gradients aside."""
        for hook in self.refusing:
            hook.remove()
        self.refusing.clear()

    def check_unscaled(self) -> None:
        """Refuse to step with gradients that still carry the loss scale."""
        self.ending.unwind()
        if self.is_open and self.end_backward is not None:
            if self.holds_raw():
                raise refusals.passes_by_scaler()
            self.end_backward()
        if self.is_open:
            raise refusals.inside_block("optimizer.step()")
        self._forget_abandoned()
        if self.stage is Stage.SCALED:
            raise refusals.still_scaled()

    def prepare_step(self) -> None:
        """Bring masters up to date with what the user did to half weights and gradients."""
        self.check_unscaled()
        self.read_back_shown()
        if self.masters is not None:
            self.masters.adopt()
            # No block may have come yet; more may be written before it if there are no gradients.
            compares = any(table.compares for table in self.tables)
            self._compare_now()
            if compares and not self.holds_any():
                self.compare_weights()
            for table in self.tables:
                if table.packs and is_capturing(table.halves[0].device):
                    raise refusals.captured_while_split()
                table.absorb()
                # Packed now, masters leave their memory to what the first step makes.
                takes_stored = getattr(self.optimizer, "takes_stored", False)
                (table.pack if takes_stored else table.make)()
                table.is_stepping = True

    def write_halves(self) -> None:
        """Round the masters into the half weights."""
        for table in self.tables:
            table.write_halves()

    def finish_step(self) -> None:
        """Use the gradients up, taken or not."""
        self.known_norm.end_step()
        for table in self.tables:
            table.gradients.spend()
            table.is_stepping = False
        self.reset()

    def count(self, *, skipped: bool) -> None:
        """Count a step."""
        self.steps_skipped += int(skipped)
        self.steps_applied += int(not skipped)
        self.skips_in_row = self.skips_in_row + 1 if skipped else 0

    def reset(self) -> None:
        """Back to READY: no overflow, nothing delayed."""
        self.stage = Stage.READY
        self.delayed = None
        self.known_norm.forget()
        self._reduced_at = self._reductions.unreduced
        self.found_inf = None
        self.notes.clear()
        self.watched.clear()

    def begin_anew(self) -> None:
        """Drop all gradients, and forget what earlier ones have shown."""
        self.drop_gradients()
        for param in self.direct_params():
            param.grad = None
        self.heard = None


def params_of_group(group: Any) -> list[torch.Tensor]:
    """The parameters of a new group, in which the model's half ones take their masters' places.

    Mutates the group, which torch does too. None where it is no group, which torch refuses.
    """
    given: Any = cast("dict[str, Any]", group).get("params") if isinstance(group, dict) else None
    if isinstance(given, torch.Tensor):
        given = [given]
    if not isinstance(given, Iterable) or isinstance(given, set):
        return []
    items = list(cast("Iterable[Any]", given))
    pairs: list[tuple[Any, Any]] = [i if isinstance(i, tuple) else (None, i) for i in items]
    params = leaves_of([param for _, param in pairs])
    named = zip(pairs, params, strict=True)
    group["params"] = [param if name is None else (name, param) for (name, _), param in named]
    return params


def make_sessions(
    optimizers: Sequence[torch.optim.Optimizer],
    ops: Ops,
    name_of: NameOf,
    reductions: Reductions,
    *,
    has_masters: bool,
    ignores_rewriting: bool,
    storage: Storage,
) -> dict[int, OptimizerSession]:
    """One session for each optimizer, by its ``id``."""
    rewriting, every = Rewriting(is_ignored=ignores_rewriting), list[Masters]()
    sessions: dict[int, OptimizerSession] = {}
    for optimizer in optimizers:
        masters = None
        if has_masters:
            masters = Masters(optimizer, WeightTable(ops, rewriting, storage), name_of, every)
            every.append(masters)
        sessions[id(optimizer)] = OptimizerSession(optimizer, ops, masters, reductions)
    return sessions
