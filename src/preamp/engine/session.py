# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer in an engine: its weights, its gradients, what was found in them, and counters.

Blocks and hooks talk to it. It follows the gradients through a backward: set aside, scaled, merged
and unscaled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from operator import is_
from typing import Any

import torch

from preamp.core.ranks import has_process_group
from preamp.core.tensors import (
    addresses_of,
    are_same,
    grad_of,
    has_sharded,
    host_reaches,
    is_sharded,
    versions_of,
    with_gradients,
)
from preamp.core.torch_private.shards import place_gradients
from preamp.core.undo import Step, UndoStack, run_all, unwind
from preamp.engine import refusals
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import Reductions
from preamp.kernels import Census, Ops
from preamp.optim import (
    DirectGradients,
    SplitTable,
    State,
    WeightTable,
    cast_state,
    leaves_of,
    without_masters,
)
from preamp.optim.fused.base import FusedOptimizer
from preamp.optim.rank_norms import of_all_ranks
from preamp.policy.storage import Storage
from preamp.scaling import LossScaler
from preamp.scaling.scaler import larger

NameOf = Callable[[torch.Tensor], str]
Factor = torch.Tensor | None  # that unscales: a float32 scalar; ``None`` where there is no scale
_NOTES_KEPT = 256  # backwards between two steps that an overflow message can still look back on


@dataclass(slots=True, eq=False)
class Exit:
    """How a block ends."""

    is_over: bool = False  # the script is out of the ``with`` statement, whatever was raised
    left: list[Step] = field(default_factory=list[Step])  # to be done, the last one first


Norm = tuple[torch.Tensor, int, list[Any], list[int]]
"""The norm of unscaled gradients; by what to tell that they are the same: changes of the table,
gradients without masters, versions of these and addresses of all."""


class OptimizerSession:
    """One optimizer of an engine: its weights, its gradients, and what was found in them.

    A block is `check_outside_block`, `begin`, then `undo`, or `unscale` and `commit`. Nothing is
    lost before `commit`: each of the others may fail and be followed by `undo`. What ends a block
    (`undo`, `commit`) may be called again, where it was interrupted and where it was not.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, ops: Ops, table: WeightTable, reductions: Reductions
    ) -> None:
        """Take over the bookkeeping of ``optimizer``; makes no masters yet."""
        self.optimizer = optimizer
        self.table = table  # its half weights with masters; without any rows at other levels
        self.gradients = table.gradients  # of half weights that have a master
        self.direct = DirectGradients(ops)  # of all other parameters
        self.is_open = False  # whether a ``scale_loss`` block is under way
        self.awaits_step = False  # whether one has ended, and no step or zeroing has come since
        # Not zero if the next step must be skipped; ``None`` if nobody looked
        self.found_inf: torch.Tensor | None = None
        # What the backwards since the last step found, for overflow messages
        self.notes: deque[GradientNote] = deque(maxlen=_NOTES_KEPT)
        # The same where nobody acts on it, but the modules are watched
        self.watched: deque[GradientNote] = deque(maxlen=_NOTES_KEPT)
        # Whether the script has clipped in this step, and in the one before it: then a census takes
        # the norm along, which spares clipping a pass over gradients
        self.clips = self.has_clipped = False
        self._scaled_norm: torch.Tensor | None = None  # of all gradients of the block, if it counts
        self.norm: Norm | None = None  # for as long as gradients stay as they were
        self.backwards = 0
        self.steps_applied = 0  # steps that updated the weights
        self.steps_skipped = 0  # steps not taken because of overflow
        self.skips_in_row = 0  # skipped steps since the last applied one
        # Ends a backward that a `GradScaler` has left open; ``None`` if none is
        self.end_backward: Callable[[], None] | None = None
        self.exit = Exit()  # of the block under way, or of the latest one
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
        self.direct_params()
        return self._leaves

    def direct_params(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates without a master."""
        params = self.params()
        if not are_same(params, self._params):
            self._params, self._leaves = [*params], leaves_of(params)
            self._direct_params = without_masters(params)
        return self._direct_params

    def release_masters(self) -> None:
        """Give the optimizer its half parameters back, and hold no parameters any more."""
        self.table.release()
        self._params, self._leaves, self._direct_params, self.direct.params = [], [], [], []

    def recast_state(self, undo: UndoStack | None = None) -> None:
        """Bring the optimizer's state to the dtype of its parameters, after these changed.

        That of a fused optimizer goes where its storage says; its steps bring it to its dtype.

        In place: ``optimizer.load_state_dict`` would replace the group dicts that schedulers hold.
        ``undo`` gets what brings the very tensors back.
        """
        if isinstance(self.optimizer, FusedOptimizer):
            self.optimizer.place_state()
            return
        state: dict[Any, Any] = self.optimizer.state
        for param in self.params():
            if param in state and isinstance(state[param], dict):
                if undo is not None:
                    undo.push(partial(state[param].update, state[param].copy()))
                cast_state(state[param], param)

    # -- a backward begins -------------------------------------------------------------------

    def check_outside_block(self, what: str) -> None:
        """Raise `PreampStateError` where a block is under way: ``what`` needs whole gradients.

        One that a `GradScaler` has left open ends.
        """
        self.finish_interrupted()
        if self.is_open:
            self.end_left_open()
            if self.is_open:
                raise refusals.inside_block(what)

    def end_left_open(self) -> None:
        """Let gradients be unscaled now, if a `GradScaler` would do so later."""
        self.finish_interrupted()
        if self.is_open and self.end_backward is not None:
            self.end_backward()

    def finish_interrupted(self) -> None:
        """Do what an interrupt has left of a block's end; take back a block that was left open."""
        if self.exit.left:
            unwind(self.exit.left)
        if self.is_open and self.exit.is_over:
            self.undo()

    def begin(
        self,
        scaler: LossScaler,
        claimed: set[int],
        *,
        may_reduce: bool = False,
        is_held_open: bool = False,
        block_exit: Exit | None = None,
    ) -> None:
        """Make room for a backward, in which a hook ``may_reduce`` over ranks.

        Where the block ``is_held_open`` float32 gradients are summed in place and scaled, as by
        torch: what a script zeroes counts for all that was accumulated.
        ``claimed`` has the ``id`` of parameters handled for another optimizer, and is extended.
        Mutates the parameters' ``grad``.
        """
        if (self.found_inf is not None or self.watched) and not self.holds_any():
            self.reset()  # the gradients that overflowed were dropped or zeroed: a fresh start
        self.norm = None
        own = self.direct_params()
        self._has_claimed = not claimed.isdisjoint(map(id, own))
        if self._has_claimed:
            own = [param for param in own if id(param) not in claimed]
        claimed.update(map(id, own))
        scale = 1.0 if scaler.is_identity else scaler.scale
        is_local = self._reduced_at != self._reductions.unreduced  # some are this rank's alone
        carry = scale if may_reduce and is_local else None
        self.gradients.take_in()  # may refuse before anything is moved
        self.exit = block_exit or Exit()
        self.is_open = True  # for `undo`, which takes back as much as was done
        self.direct.begin(own, scale if is_held_open else carry, may_be_overwritten=may_reduce)
        if self.table.is_fresh:
            self._start_weights()
        self.gradients.begin(carry)

    def _start_weights(self) -> None:
        self.table.start(from_halves=self._reductions.are_by_hand)

    # -- a backward ends ---------------------------------------------------------------------

    def undo(self) -> None:
        """The block failed: drop its gradients, restore those from before."""
        self.norm = None
        try:
            if self.is_open:
                run_all((self.direct.put_back, self.gradients.put_back))
        except Exception:  # whatever could not be restored: the next block begins clean
            self.is_open = False
            raise
        self.is_open = False

    def unscale(
        self, scaler: LossScaler, note: GradientNote, factor: Factor, *, is_reduced: bool
    ) -> torch.Tensor | None:
        """The backward is over: look for overflow, and join what came with earlier gradients.

        New gradients are multiplied by ``factor``, if any, and the earlier ones are added; those of
        half weights stay apart as they are until somebody asks for the sum. ``is_reduced`` is for
        gradients certainly reduced over ranks.

        Returns a float32 scalar on the device, 1.0 if any new gradient is infinite or nan; ``None``
        for static scales: these look only where modules are watched. ``note`` is filled.

        Raises `PreampStateError` for sparse gradients of half weights.
        """
        found_inf = self._census(scaler, note, is_reduced=is_reduced)
        self.direct.merge(factor)
        if self.gradients.may_have_bases:
            self.gradients.show_missing()
        return found_inf

    def _census(
        self, scaler: LossScaler, note: GradientNote, *, is_reduced: bool
    ) -> torch.Tensor | None:
        self._scaled_norm = None
        self.gradients.read_new()
        leaves = self._leaves
        if self._has_claimed:
            own = {*map(id, self.direct.params), *map(id, self.table.halves)}
            leaves = [leaf for leaf in leaves if id(leaf) in own]
        if has_sharded(leaves):
            place_gradients(leaves)
        if not scaler.is_dynamic:
            if note.watched is not None:
                self.look(leaves, scaler.device, note, is_joint=False)
            return None
        # What is another optimizer's as well counts in this one's norm, and is not read here.
        wants_norm = (self.clips or self.has_clipped) and not self._has_claimed
        grads, census = self.look(leaves, scaler.device, note, with_norm=wants_norm)
        norm, has_earlier = census.norm, self.direct.has_earlier or self.gradients.has_earlier
        if norm is None or has_earlier:
            return census.found_inf
        # Squares of scaled gradients may have overflowed; those of float16 ones cannot.
        if host_reaches(norm):
            is_sound = bool(torch.isfinite(norm))
        else:
            is_sound = all(grad.dtype is torch.float16 for grad in grads)
        # What ranks have yet to reduce a script may reduce, and torch counts no such write.
        if is_sound and (is_reduced or not has_process_group() or all(map(is_sharded, grads))):
            self._scaled_norm = norm
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
        params = leaves
        grads: Any = self.gradients.new_of(leaves)
        if grads is None or any(map(is_, grads, repeat(None))):
            params, grads = with_gradients(leaves)
        census = self._ops.census(grads, device, with_norm=with_norm)
        if census.max_abs is not None:
            note.add(params, grads, census)
        if is_joint and (has_sharded(leaves) or self.splits.given):
            census = of_all_ranks(census, leaves, params, self.splits)
        note.found_inf.append(census.found_inf)
        return grads, census

    def commit(self, factor: Factor, *, is_reduced: bool = False) -> None:
        """The block ends; ``factor`` and ``is_reduced`` as for `unscale`."""
        if is_reduced:
            self._reduced_at = self._reductions.unreduced
        self.direct.commit()
        self.gradients.commit(factor)
        norm = self._scaled_norm
        if norm is not None and self.gradients.state is not State.MADE:
            # As a power of two the factor makes no difference to when it is applied.
            norm = norm if factor is None else norm * factor.to(norm.device)
            self.norm = norm, *self._marks()
        self.is_open = False
        self.awaits_step = True
        self.backwards += 1

    # -- gradients between backwards ---------------------------------------------------------

    def holds_raw(self) -> bool:
        """Whether any gradient lies on the model's side."""
        return any(param.grad is not None for param in self.model_params())

    def holds_any(self, *, of_blocks: bool = True) -> bool:
        """Whether gradients from before are left; those that the script zeroed do not count."""
        own = self.direct_params()
        return self.direct.holds_gradient(own, of_blocks=of_blocks) or self.gradients.holds_gradient

    def is_within_step(self) -> bool:
        """Whether gradients of a block wait for their step, neither dropped nor zeroed."""
        return self.awaits_step and self.holds_any()

    def _marks(self) -> tuple[int, list[Any], list[int]]:
        grads = list(map(grad_of, self._direct_params))
        marks = versions_of(grads) + addresses_of(grads + self.gradients.seen)
        return self.gradients.changes, grads, marks

    def take_norm(self) -> torch.Tensor | None:
        """The norm of the gradients as they are, if a census tells; they will be clipped by it."""
        self.clips = True
        found, self.norm = self.norm, None  # clipped gradients have another
        if found is None:
            return None
        norm, changes, grads, marks = found
        now = self._marks()
        is_same = now[0] == changes and now[2] == marks and are_same(now[1], grads)
        return norm if is_same else None

    def read_back_shown(self) -> None:
        """Take in what a script did to gradients that are shown unscaled; all ranks call it."""
        if self.overflowed():
            self.gradients.note_all()  # no step will use them
        else:
            splits = self.splits if self.splits.concern(self.table.halves) else None
            self.gradients.take_in(splits, looks=True)

    def fill_with_zeros(self, original: Callable[[], Any]) -> Any:
        """Fill every gradient of this optimizer with zeros, the model's half ones included."""
        self.finish_interrupted()
        self.reset()
        self.direct.forget()
        self.gradients.zero()  # and are nobody's, since the optimizer would widen them
        try:
            return original()
        finally:
            self.gradients.be_zeros()

    def drop_gradients(self) -> None:
        """Drop all that masters have, and the model's half ones, and what was set aside."""
        self.finish_interrupted()
        self.direct.forget()
        self.gradients.drop()
        self.reset()

    # -- an overflow -------------------------------------------------------------------------

    def remember(self, found_inf: torch.Tensor, note: GradientNote) -> None:
        """Keep an overflow until the next step, whichever optimizer's gradients showed it."""
        self.found_inf = found_inf = larger(found_inf, self.found_inf)
        # The first backward that overflowed is told; where the host is near, it is known by now.
        if host_reaches(found_inf) and (self.notes or not bool(found_inf != 0)):
            return
        if not self.notes or self.notes[-1] is not note:
            self.notes.append(note)

    def remember_watched(self, note: GradientNote) -> None:
        """Keep what a backward has found, of which nothing follows, until the next step."""
        if not self.watched or self.watched[-1] is not note:
            self.watched.append(note)

    def overflowed(self, *, may_stay_unread: bool = False) -> bool:
        """Whether the gradients at hand contain an overflow. Synchronises if any was possible.

        The flag ``may_stay_unread`` if the optimizer can obey it on the device and the host is not
        near: then it is left in `found_inf`, and the answer is no. torch's protocol for that is the
        one of its ``GradScaler``; fused optimizers follow it.
        """
        found_inf = self.found_inf
        if found_inf is None:
            return False
        if may_stay_unread and not host_reaches(found_inf) and self.obeys_on_device:
            return False
        if found_inf.item() != 0:
            return True
        self.found_inf = None  # known to be clean: not asked for again
        return False

    @property
    def obeys_on_device(self) -> bool:
        """Whether the optimizer skips a step by itself where the flag on the device says so."""
        name, optimizer = "_step_supports_amp_scaling", self.optimizer
        # One that forwards every name to an optimizer inside is not told for that one.
        is_own = name in vars(optimizer) or hasattr(type(optimizer), name)
        return is_own and bool(getattr(optimizer, name))

    # -- one step ----------------------------------------------------------------------------

    def prepare_step(self) -> None:
        """Take in what the script did before a step; masters follow half weights.

        But where kernels take half weights for the truth: these start from them.
        """
        self.check_outside_block("optimizer.step()")
        if self.gradients.is_shown:
            self.read_back_shown()
        table = self.table
        table.adopt()
        if table.is_fresh and self.holds_any():
            self._start_weights()  # no block may have come yet
        if not table.updates_halves:  # else its kernels take half weights for the truth
            table.absorb()
        table.is_stepping = True

    def finish_step(self) -> None:
        """Use the gradients up, taken or not."""
        self.clips, self.has_clipped = False, self.clips
        self.gradients.spend()
        self.table.is_stepping = False
        self.reset()

    def count(self, *, skipped: bool) -> None:
        """Count a step."""
        self.steps_skipped += int(skipped)
        self.steps_applied += int(not skipped)
        self.skips_in_row = self.skips_in_row + 1 if skipped else 0

    def reset(self) -> None:
        """No gradients wait for a step, and nothing was found in any."""
        self.awaits_step = False
        self.norm = None
        self._reduced_at = self._reductions.unreduced
        self.found_inf = None
        self.notes.clear()
        self.watched.clear()

    def begin_anew(self) -> None:
        """Drop all gradients, and forget what earlier ones have shown."""
        self.drop_gradients()
        for param in self.direct_params():
            param.grad = None


def make_sessions(
    optimizers: Sequence[torch.optim.Optimizer],
    ops: Ops,
    name_of: NameOf,
    reductions: Reductions,
    *,
    has_masters: bool,
    storage: Storage,
) -> dict[int, OptimizerSession]:
    """One session for each optimizer, by its ``id``."""
    tables = list[WeightTable]()
    sessions: dict[int, OptimizerSession] = {}
    kind = SplitTable if storage.masters == "split" else WeightTable
    for optimizer in optimizers:
        table = kind(
            optimizer, ops, storage, name_of=name_of, others=tables, has_masters=has_masters
        )
        table.updates_halves = isinstance(optimizer, FusedOptimizer)
        tables.append(table)
        sessions[id(optimizer)] = OptimizerSession(optimizer, ops, table, reductions)
    return sessions
