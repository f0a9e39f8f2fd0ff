# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer's gradients through a backward: set aside, scaled, merged and unscaled."""

from __future__ import annotations

from collections.abc import Callable

import torch

from preamp.engine import refusals
from preamp.engine.known_norm import KnownNorm
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import Reductions
from preamp.engine.stage import Delayed, Plan, Stage
from preamp.kernels import Ops
from preamp.kernels.shards import place_gradients
from preamp.optim import DirectGradients, Masters, WeightTable, leaves_of, without_masters
from preamp.scaling import LossScaler


class GradientBooks:
    """Where the gradients of one optimizer stand: READY → SCALED → UNSCALED → READY.

    A block is `begin`, then `abort`, `delay`, or `census`, `merge` and `commit`. Nothing is lost
    before `commit`: each of the others may fail and be followed by `abort` or `undo`.

    Attributes:
        masters: The optimizer's masters, or ``None`` at levels without.
        stage: Where the gradients stand.
        is_open: Whether a ``scale_loss`` block is under way.
        known_norm: What a census found, if clipping wants it.
        direct, delayed: Gradients without masters; those left scaled, or ``None``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        masters: Masters | None,
        ops: Ops,
        reductions: Reductions,
    ) -> None:
        """Keep the books of ``optimizer``."""
        self.masters = masters
        self.stage = Stage.READY
        self.is_open = False
        self.known_norm = KnownNorm()
        self._reductions = reductions
        self._reduced_at = reductions.unreduced
        self._optimizer = optimizer
        self._ops = ops
        self.direct = DirectGradients(ops)
        self._own: list[torch.Tensor] = []  # without masters, in this block only
        self._has_claimed = False  # whether another optimizer of the block has some of them
        self.delayed: Delayed | None = None

    def params(self) -> list[torch.Tensor]:
        """What the optimizer updates."""
        groups = self._optimizer.param_groups
        if len(groups) == 1:
            return groups[0]["params"]
        return [param for group in groups for param in group["params"]]

    def direct_params(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates without a master."""
        return without_masters(self.params())

    @property
    def tables(self) -> list[WeightTable]:
        """Of the half parameters that have masters."""
        return [] if self.masters is None else self.masters.tables

    # -- a block begins ----------------------------------------------------------------------

    def begin(self, plan: Plan, claimed: set[int]) -> None:
        """Make room for a backward. Mutates the parameters' ``grad``.

        Args:
            plan: What the block is going to do.
            claimed: ``id`` of parameters that the block handles for another optimizer; extended.
        """
        self.known_norm.forget()
        self._own = self._unclaimed(claimed)
        if self.delayed is None:  # otherwise raw gradients of one scale pile up in place
            carry: torch.Tensor | float | None = None
            scale = 1.0 if plan.scaler.is_identity else plan.scaler.scale
            if plan.may_reduce and self.may_be_local:
                carry = scale
            for table in self.tables:
                if not table.is_open:
                    table.reconcile()  # all may refuse before anything is moved
            # Takes itself back if it fails.
            self.direct.set_aside(
                self._own,
                carry,
                scale if plan.will_delay else None,
                may_be_overwritten=plan.may_reduce,
            )
            self.is_open = True
            self.compare_weights()
            for table in self.tables:
                table.begin(carry)
        else:
            self._reconcile_raw()
        self.is_open = True

    def compare_weights(self) -> None:
        """Take in what was written without a trace after weights were made or loaded."""
        for table in self.tables:
            if table.compares:  # mostly not, and who reduces is a walk over all modules
                table.compare(rounds=self._reductions.are_by_hand)

    def _reconcile_raw(self) -> None:
        """Take in what the script dropped or zeroed of gradients left scaled."""
        self.direct.reconcile_raw()
        for table in self.tables:
            table.reconcile_raw()

    @property
    def may_be_local(self) -> bool:
        """Whether there may be gradients of this rank alone, not reduced yet."""
        return self._reduced_at != self._reductions.unreduced

    @property
    def has_aside(self) -> bool:
        """Whether an earlier gradient is away while others were left scaled."""
        return self.direct.has_aside or any([table.has_aside for table in self.tables])

    def _unclaimed(self, claimed: set[int]) -> list[torch.Tensor]:
        own = self.direct_params()
        self._has_claimed = not claimed.isdisjoint(map(id, own))
        if self._has_claimed:
            own = [param for param in own if id(param) not in claimed]
        claimed.update(map(id, own))
        return own

    def continues_with(self, scaler: LossScaler) -> bool:
        """Whether gradients left scaled, if any, can be added to as they are."""
        return self.delayed is None or self.delayed.continues_with(scaler)

    # -- a block ends ------------------------------------------------------------------------

    def abort(self) -> None:
        """The body raised: drop its gradients, restore those from before."""
        if self.is_open and self.delayed is None:
            self.undo()
        # After a delayed block nothing was set aside; what autograd added stays, as in torch.
        self.is_open = False

    def end_body(self) -> None:
        """The body of the block has ended: take in what it dropped."""
        self.direct.end_body()
        for table in self.tables:
            table.end_body()

    def undo(self) -> None:
        """Restore the gradients from before the block, or from before the first delayed one."""
        was_open, self.is_open = self.is_open, False
        self.known_norm.forget()
        if self.delayed is not None:
            self.delayed, self.stage = None, Stage.READY
        if was_open:
            self.direct.put_back(self._own)
            for table in self.tables:
                table.put_back()

    def delay(self, scaler: LossScaler, note: GradientNote, generation: int) -> None:
        """Leave the gradients scaled; a later block unscales them all.

        Args:
            scaler: The loss's scaler.
            note: Of the block; holds the scale.
            generation: The scaler's when the block began.
        """
        self.is_open = False
        self.direct.note_raw()
        for table in self.tables:
            table.stand_in()
            table.note_raw()
        if self.delayed is None:
            inverse = None if scaler.is_identity else note.scale.reciprocal()
            self.delayed = Delayed(scaler, generation, inverse, note)
        self.delayed.has_gradients |= self.holds_raw()
        self.delayed.note, self.stage = note, Stage.SCALED

    def census(self, scaler: LossScaler, note: GradientNote) -> torch.Tensor | None:
        """Look for overflow; note what is found.

        Returns:
            float32 scalar on the device, 1.0 if any new gradient is infinite or nan; ``None``
            for static scales, which do not look.
        """
        leaves = leaves_of(self.params())
        if self._has_claimed:
            own = {*map(id, self._own), *(id(half) for t in self.tables for half in t.halves)}
            leaves = [leaf for leaf in leaves if id(leaf) in own]
        place_gradients(leaves)
        if not scaler.is_dynamic:
            return None
        wants_norm = self.known_norm.is_wanted
        grads, census = self._reductions.joint.look(
            self._ops, leaves, scaler.device, note, with_norm=wants_norm
        )
        if census.norm is not None and not self._holds_earlier():
            self.known_norm.note(census.norm, grads)
        return census.found_inf

    def _holds_earlier(self) -> bool:
        """Whether earlier gradients join those of this backward."""
        return self.direct.has_earlier or any([table.has_bases for table in self.tables])

    def merge(self, factor: torch.Tensor | None) -> None:
        """Unscale the new gradients and add the earlier ones.

        Args:
            factor: float32 scalar, or ``None`` where there is nothing to unscale.
        """
        self.direct.merge(self._own, factor)
        for table in self.tables:
            table.stand_in()

    def commit(self, factor: torch.Tensor | None, *, is_reduced: bool = False) -> None:
        """The block ends.

        Args:
            factor: The one that `merge` got.
            is_reduced: Whether all gradients have certainly been reduced over ranks.
        """
        if is_reduced:
            self._reduced_at = self._reductions.unreduced
        self.direct.commit(self._own)
        factors: dict[torch.device, torch.Tensor] = {}

        def on(device: torch.device) -> torch.Tensor:
            if device not in factors:  # one elsewhere would make clipping wait for a copy
                one = torch.ones((), device=device)
                factors[device] = one if factor is None else factor.to(device)
            return factors[device]

        for table in self.tables:
            table.collect(on, is_plain=factor is None)
        is_reduced = is_reduced or self.known_norm.is_of_sharded
        self.known_norm.commit(factor, tuple(factors.values()), is_reduced=is_reduced)
        self.is_open = False
        self.stage = Stage.UNSCALED
        self.delayed = None

    # -- gradients left scaled ---------------------------------------------------------------

    def settle(self, claimed: set[int]) -> tuple[torch.Tensor, GradientNote] | None:
        """Unscale delayed gradients by the scale they carry, since the next one differs.

        Args:
            claimed: As for `begin`.

        Returns:
            What `census` found and the note of it; ``None`` where nobody looked.
        """
        delayed = self.delayed
        if delayed is None:
            return None
        self._reconcile_raw()
        self._own = self._unclaimed(claimed)
        self.refuse_sparse()
        self.is_open = True
        try:
            found_inf = self.census(delayed.scaler, delayed.note)
            self.merge(delayed.inverse)
            self.commit(delayed.inverse)
        except BaseException:
            self.undo()
            raise
        return None if found_inf is None else (found_inf, delayed.note)

    def holds_raw(self) -> bool:
        """Whether any gradient lies on the model's side."""
        return any([leaf.grad is not None for leaf in leaves_of(self.params())])

    def holds_any(self) -> bool:
        """Whether gradients from before are left; those that the script zeroed do not count."""
        return self.direct.holds_gradient(self.direct_params()) or any(
            [table.holds_gradient for table in self.tables]
        )

    def is_abandoned(self) -> bool:
        """Whether the script has dropped all gradients of a delayed accumulation."""
        delayed = self.delayed
        return delayed is not None and delayed.has_gradients and not self.holds_raw()

    def refuse_sparse(self) -> None:
        """Raise `PreampStateError` if a parameter with a master has a sparse gradient."""
        for table in self.tables:
            for row, half in enumerate(table.halves):
                if half.grad is not None and half.grad.is_sparse:
                    raise refusals.sparse_with_master(table.twins[row].name)

    # -- after the step ----------------------------------------------------------------------

    def spend(self) -> None:
        """A step has used the masters' gradients up."""
        self.known_norm.end_step()
        for table in self.tables:
            table.spend()

    def drop(self) -> None:
        """Clear the masters' gradients and their half ones, and what was set aside."""
        for table in self.tables:
            table.drop(in_backward=self.is_open)
        self.direct.forget()

    def zero(self, zero_rest: Callable[[], object]) -> object:
        """Fill them with zeros instead; see `Masters.zero_gradients`."""
        self.direct.forget()
        if self.masters is None:
            return zero_rest()
        return self.masters.zero_gradients(zero_rest, in_backward=self.is_open)

    def reset(self) -> None:
        """Back to READY: nothing delayed."""
        self.stage = Stage.READY
        self.delayed = None
        self.known_norm.forget()
        self._reduced_at = self._reductions.unreduced

    def resume(self, stage: Stage, delayed: Delayed | None, *, may_be_local: bool) -> None:
        """Go on where another process has stopped."""
        self.stage, self.delayed = stage, delayed
        self._reduced_at = self._reductions.unreduced - int(may_be_local)
