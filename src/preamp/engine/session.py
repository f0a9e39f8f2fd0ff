# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer in an engine: its gradients, its masters, what was found, and its counters.

Blocks and hooks talk to it. It follows the gradients through a backward: set aside, scaled, merged
and unscaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    is_sharded,
    versions_of,
    with_gradients,
)
from preamp.core.torch_private.shards import place_gradients
from preamp.core.undo import UndoStack, run_all
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
    SplitTable,
    WeightTable,
    cast_state,
    leaves_of,
    without_masters,
)
from preamp.optim.fused.base import FusedOptimizer
from preamp.optim.fused.keeping import KeepsMoments
from preamp.policy.storage import Storage
from preamp.scaling import LossScaler
from preamp.scaling.scaler import larger

NameOf = Callable[[torch.Tensor], str]
_NOTES_KEPT = 256  # backwards between two steps that an overflow message can still look back on


@dataclass(slots=True, eq=False)
class Exit:
    """Whether the script is out of the ``with`` statement of a block, however it has ended."""

    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a ``scale_loss`` block is going to do with the gradients of its backward."""

    scaler: LossScaler
    may_reduce: bool = False  # a hook may reduce them over ranks
    exit: Exit = field(default_factory=Exit)


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

    A block is `begin_backward`, then `undo`, or `census`, `merge` and `commit`. Nothing is lost
    before `commit`: each of the others may fail and be followed by `undo`. What ends a block
    (`undo`, `commit`) may be called again, where it was interrupted and where it was not.
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
        self.is_open = False  # whether a ``scale_loss`` block is under way
        self.awaits_step = False  # whether one has ended, and no step or zeroing has come since
        self.direct = DirectGradients(ops)  # gradients of parameters without a master
        self.known_norm = KnownNorm()  # what a census found, if clipping wants it
        # Not zero if the next step must be skipped; ``None`` if nobody looked
        self.found_inf: torch.Tensor | None = None
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
        self.exit = Exit()  # of the block under way, or of the latest one
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
        if self.is_open:
            raise refusals.inside_block("add_param_group")

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

    def _start_weights(self) -> None:
        for table in self.tables:
            if table.is_fresh:  # mostly not, and who reduces is a walk over all modules
                table.start(from_halves=self._reductions.are_by_hand)

    def adopt(self, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        """Make masters for half parameters that lack one; see `Masters.adopt`."""
        if self.masters is not None:
            self.masters.adopt(originals)

    # -- a backward begins -------------------------------------------------------------------

    def refuse_nested(self) -> None:
        """Raise `PreampStateError` if this optimizer is in a ``scale_loss`` block already.

        Both blocks would unscale the same gradients.
        """
        self.settle()
        if self.is_open:
            raise refusals.nested(self.optimizer)

    def begin_backward(self, plan: Plan, claimed: set[int]) -> None:
        """Make room for a backward. Mutates the parameters' ``grad``.

        ``claimed`` has the ``id`` of parameters handled for another optimizer, and is extended.
        """
        has_found = self.found_inf is not None or self.watched
        if has_found and not self.holds_any():
            self._forget_overflow()
        self.known_norm.forget()
        own = self.direct.params = self._unclaimed(claimed)
        carry: torch.Tensor | float | None = None
        if plan.may_reduce and self.may_be_local:
            carry = 1.0 if plan.scaler.is_identity else plan.scaler.scale
        for halves in self.half_gradients:
            halves.take_in()  # may refuse before anything is moved
        self.exit = plan.exit
        self.is_open = True  # for `undo`, which takes back as much as was done
        self.direct.begin(own, carry, may_be_overwritten=plan.may_reduce)
        self._start_weights()
        for halves in self.half_gradients:
            halves.begin(carry)

    def _unclaimed(self, claimed: set[int]) -> list[torch.Tensor]:
        own = self.direct_params()
        self._has_claimed = not claimed.isdisjoint(map(id, own))
        if self._has_claimed:
            own = [param for param in own if id(param) not in claimed]
        claimed.update(map(id, own))
        return own

    # -- a backward ends ---------------------------------------------------------------------

    def undo(self) -> None:
        """The block failed: drop its gradients, restore those from before."""
        self.known_norm.forget()
        try:
            if self.is_open:
                run_all([some.put_back for some in self.gradients])
        except Exception:  # whatever could not be restored: the next block begins clean
            self.is_open = False
            raise
        self.is_open = False

    def settle(self) -> None:
        """Do what an interrupt has left of a block's end; take back a block that was left open."""
        self.ending.unwind()
        if self.is_open and self.exit.is_over:
            self.undo()

    def arrive(self) -> None:
        """The backward is over: tables read their half gradients, and refuse sparse ones."""
        for halves in self.half_gradients:
            halves.arrive()

    def census(self, scaler: LossScaler, note: GradientNote) -> torch.Tensor | None:
        """Look for overflow; note what is found.

        Returns a float32 scalar on the device, 1.0 if any new gradient is infinite or nan; ``None``
        for static scales: these look only where modules are watched.
        """
        leaves = self._leaves
        if self._has_claimed:
            halves = [half for table in self.tables for half in table.halves]
            own = {*map(id, self.direct.params), *map(id, halves)}
            leaves = [leaf for leaf in leaves if id(leaf) in own]
        if has_sharded(leaves):
            place_gradients(leaves)
        if not scaler.is_dynamic:
            if note.watched is not None:
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
        self.awaits_step = True
        self.backwards += 1

    # -- gradients between backwards ---------------------------------------------------------

    @property
    def may_be_local(self) -> bool:
        """Whether there may be gradients of this rank alone, not reduced yet."""
        return self._reduced_at != self._reductions.unreduced

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
        return self.awaits_step and self.holds_any()

    def made_gradients(self, *, all_of_them: bool) -> tuple[list[Any], list[torch.Tensor]]:
        """Gradients that are made (now, if ``all_of_them``), and the model's parameters."""
        direct, grads = with_gradients(self.direct_params())
        for table in self.tables:
            halves = table.gradients
            halves.take_in()
            if all_of_them:
                halves.make_all()
            if halves.may_have_bases:
                pairs = zip(table.halves, halves.bases(), strict=True)
                made = [(half, base) for half, base in pairs if base is not None]
                direct += [half for half, _ in made]
                grads += [base for _, base in made]
        return grads, direct

    def marks(self) -> Marks:
        """What differs once gradients are no longer those that the latest backward has left."""
        grads = list(map(grad_of, self._direct_params))
        for halves in self.half_gradients:
            if halves.may_have_bases:
                grads += halves.bases()
        return [halves.changes for halves in self.half_gradients], grads, versions_of(grads)

    def read_back_shown(self) -> None:
        """Take in what a script did to gradients after ``unscale_``; all ranks call it."""
        for table in self.tables:
            halves = table.gradients
            if halves.is_shown and self.overflowed():
                halves.ignore_writes()  # no step will use them
            elif halves.is_shown:
                splits = self.splits if self.splits.concern(table.halves) else None
                halves.take_in(splits, looks=True)

    def fill_with_zeros(self, original: Callable[[], Any]) -> Any:
        """Fill every gradient of this optimizer with zeros, the model's half ones included."""
        self.settle()
        self.reset()
        self.direct.forget()
        for halves in self.half_gradients:
            halves.zero()  # and are nobody's, since the optimizer would widen them
        try:
            return original()
        finally:
            for halves in self.half_gradients:
                halves.be_zeros()

    def drop_gradients(self) -> None:
        """Drop all that masters have, and the model's half ones, and what was set aside."""
        self.settle()
        self.direct.forget()
        for halves in self.half_gradients:
            halves.drop()
        self.reset()

    # -- an overflow -------------------------------------------------------------------------

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
        self.found_inf = None
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
        self.settle()
        if self.is_open and self.end_backward is not None:
            self.end_backward()

    def accept_backwards(self) -> None:
        """Let them come again: whoever begins one sets earlier gradients aside."""
        for hook in self.refusing:
            hook.remove()
        self.refusing.clear()

    def check_unscaled(self) -> None:
        """Refuse to step with gradients that still carry the loss scale."""
        self.settle()
        if self.is_open and self.end_backward is not None:
            if self.holds_raw():
                raise refusals.passes_by_scaler()
            self.end_backward()
        if self.is_open:
            raise refusals.inside_block("optimizer.step()")

    def prepare_step(self) -> None:
        """Bring masters up to date with what the user did to half weights and gradients."""
        self.check_unscaled()
        self.read_back_shown()
        if self.masters is not None:
            self.masters.adopt()
            if any([table.is_fresh for table in self.tables]) and self.holds_any():
                self._start_weights()  # no block may have come yet
            for table in self.tables:
                if not table.updates_halves:  # else its kernels take half weights for the truth
                    table.absorb()
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
        """No gradients wait for a step, and nothing was found in any."""
        self.awaits_step = False
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
            kind = SplitTable if storage.masters == "split" else WeightTable
            updates_halves = isinstance(optimizer, FusedOptimizer)
            table = kind(ops, rewriting, storage, updates_halves=updates_halves)
            masters = Masters(optimizer, table, name_of, every)
            every.append(masters)
        sessions[id(optimizer)] = OptimizerSession(optimizer, ops, masters, reductions)
    return sessions
