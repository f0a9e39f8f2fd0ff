# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer in an engine: its masters, its gradients, what was found, and its counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from preamp.core.protocols import StepSharing, Unshared
from preamp.core.tensors import host_reaches
from preamp.engine import refusals
from preamp.engine.adjustments import Adjustments
from preamp.engine.gradients import GradientBooks
from preamp.engine.overflow import GradientNote
from preamp.engine.reductions import Reductions
from preamp.engine.stage import Plan, Stage
from preamp.kernels import Ops
from preamp.optim import Masters, Weights, cast_state, leaves_of

NameOf = Callable[[torch.Tensor], str]
_NOTES_KEPT = 256  # backwards between two steps that an overflow message can still look back on


class OptimizerSession:
    """The gradients of one optimizer, and its masters if the policy wants them.

    Attributes:
        optimizer: The user's optimizer.
        masters: Its float32 masters, or ``None`` at levels without.
        gradients: Where its gradients stand.
        notes: What the backwards since the last step found, for overflow messages.
        found_inf: Not zero if the next step must be skipped; ``None`` if nobody looked.
        backwards: Backwards collected so far.
        steps_applied: Steps that updated the weights.
        steps_skipped: Steps not taken because of overflow.
        skips_in_row: Skipped steps since the last applied one.
        sharing: How ranks share the work of a step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        ops: Ops,
        name_of: NameOf,
        masters: Masters | None,
        reductions: Reductions,
    ) -> None:
        """Take over the bookkeeping of ``optimizer``; makes no masters yet."""
        self.optimizer = optimizer
        self.masters = masters
        self.gradients = GradientBooks(optimizer, masters, ops, reductions)
        self.notes: list[GradientNote] = []
        self.backwards = 0
        self.steps_applied = 0
        self.steps_skipped = 0
        self.skips_in_row = 0
        self.sharing: StepSharing = Unshared()
        self._name_of = name_of
        self.found_inf: torch.Tensor | None = None
        self._heard: torch.Tensor | None = None  # an overflow that the loss scale knows of

    # -- parameters --------------------------------------------------------------------------

    def direct_params(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates without a master."""
        return self.gradients.direct_params()

    def model_params(self) -> list[torch.Tensor]:
        """The model's parameters that the optimizer updates, half ones in their masters' places."""
        return leaves_of(self.gradients.params())

    def refuse_known(self, group: Any) -> None:
        """Refuse a new group with a parameter whose master the optimizer has already."""
        if self.masters is not None:
            refusals.check_group(group, self.masters, self._name_of)

    def release_masters(self) -> None:
        """Give the optimizer its half parameters back."""
        if self.masters is not None:
            self.masters.release()

    def recast_state(self) -> None:
        """Bring the optimizer's state to the dtype of its parameters, after these changed.

        In place: ``optimizer.load_state_dict`` would replace the group dicts that schedulers hold.
        """
        state: dict[Any, Any] = self.optimizer.state
        for param in self.gradients.params():
            if param in state and isinstance(state[param], dict):
                cast_state(state[param], param)

    def compare_weights(self) -> None:
        """Weights may have been written to without a trace; look at the next backward."""
        for table in self.gradients.tables:
            table.compares = True

    def adopt(self, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        """Make masters for half parameters that need one and have none.

        Args:
            originals: Their float32 values from before a cast, by ``id(parameter)``.
        """
        if self.masters is not None:
            self.masters.adopt(originals)

    # -- one backward ------------------------------------------------------------------------

    def refuse_nested(self) -> None:
        """Raise `PreampStateError` if this optimizer is in a ``scale_loss`` block already.

        Both blocks would unscale the same gradients.
        """
        if self.gradients.is_open:
            raise refusals.nested(self.optimizer)

    def settle(self, plan: Plan, claimed: set[int], adjustments: Adjustments) -> None:
        """Unscale gradients left scaled if those of the coming block cannot be added to them.

        Args:
            plan: What the block is going to do.
            claimed: ``id`` of parameters already handled for another optimizer; extended.
            adjustments: Are told what is found.
        """
        self.adopt()
        self._forget_abandoned()
        books = self.gradients
        # What is away could not be reduced with the rest.
        must_return = plan.may_reduce and books.may_be_local and books.has_aside
        if must_return or not books.continues_with(plan.scaler):
            self.settle_now(claimed, adjustments)

    def settle_now(self, claimed: set[int], adjustments: Adjustments) -> None:
        """Unscale gradients left scaled, if there are any. Arguments as `settle`."""
        books, delayed = self.gradients, self.gradients.delayed
        settled = books.settle(claimed)
        if settled is not None and delayed is not None:
            self.remember(*settled)
            if books.may_be_local:  # other ranks do not know of an overflow here yet
                adjustments.later(delayed.scaler, [self], settled[0], is_due=False)
            else:
                # Of a scale that has fallen since it says nothing new.
                is_news = delayed.scaler.scale >= delayed.note.scale
                delayed.scaler.record(self.unheard(settled[0]) * is_news)
        self.backwards += 1

    def begin_backward(self, plan: Plan, claimed: set[int]) -> None:
        """Set earlier gradients aside. Mutates the parameters' ``grad``. Arguments as `settle`."""
        if (
            self.found_inf is not None
            and self.gradients.delayed is None
            and not self.gradients.holds_any()
        ):
            self.found_inf = None  # the overflowed gradients were dropped: a fresh start
            self.notes.clear()
        if self.gradients.delayed is None:
            # Left scaled, they are joined by earlier ones in place, whose overflow is told.
            self._heard = self.found_inf if plan.will_delay else None
        self.gradients.begin(plan, claimed)

    def unheard(self, found_inf: torch.Tensor) -> torch.Tensor:
        """What the loss scale has yet to learn of ``found_inf``; nothing twice."""
        heard = self._heard
        if heard is None:
            return found_inf
        return found_inf * (heard.to(found_inf.device) == 0)

    def commit(self, factor: torch.Tensor | None, *, is_reduced: bool = False) -> None:
        """A backward has ended well; see `GradientBooks.commit`."""
        self.gradients.commit(factor, is_reduced=is_reduced)
        self.backwards += 1

    def _forget_abandoned(self) -> None:
        """Forget a delayed accumulation whose gradients the script has dropped since."""
        if self.gradients.is_abandoned():
            self.gradients.drop()
            self.reset()

    def remember(self, found_inf: torch.Tensor, note: GradientNote) -> None:
        """Keep an overflow until the next step, whichever optimizer's gradients showed it.

        Args:
            found_inf: float32 scalar, not zero if this optimizer's next step must be skipped.
            note: What to tell about it.
        """
        if self.found_inf is not None:
            found_inf = torch.maximum(self.found_inf.to(found_inf.device), found_inf)
        self.found_inf = found_inf
        # The first backward that overflowed is told; where the host is near, it is known by now.
        if host_reaches(found_inf) and (self.notes or not bool(found_inf != 0)):
            return
        if not self.notes or self.notes[-1] is not note:
            self.notes = [*self.notes[-_NOTES_KEPT + 1 :], note]

    # -- one step ----------------------------------------------------------------------------

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
        return bool(getattr(self.optimizer, "_step_supports_amp_scaling", False))

    def overflowed(self) -> bool:
        """Whether the gradients at hand contain an overflow. Synchronises if any was possible."""
        if self.found_inf is None or self.found_inf.item() != 0:
            return self.found_inf is not None
        self.found_inf = None  # known to be clean: not asked for again
        return False

    def check_unscaled(self) -> None:
        """Refuse to step with gradients that still carry the loss scale."""
        if self.gradients.is_open:
            raise refusals.inside_block("optimizer.step()")
        self._forget_abandoned()
        if self.gradients.stage is Stage.SCALED:
            raise refusals.still_scaled()

    def prepare_step(self) -> None:
        """Bring masters up to date with what the user did to the half weights."""
        self.check_unscaled()
        if self.masters is not None:
            self.masters.adopt()
            self.gradients.compare_weights()  # there may have been no block of this optimizer
            for table in self.masters.tables:
                table.absorb()

    def write_halves(self) -> None:
        """Round the masters into the half weights."""
        for table in self.gradients.tables:
            table.write_halves()

    def finish_step(self) -> None:
        """Use the gradients up, taken or not."""
        self.gradients.spend()
        self.reset()

    def count(self, *, skipped: bool) -> None:
        """Count a step."""
        self.steps_skipped += int(skipped)
        self.steps_applied += int(not skipped)
        self.skips_in_row = self.skips_in_row + 1 if skipped else 0

    def reset(self) -> None:
        """Back to READY: no overflow, nothing delayed."""
        self.gradients.reset()
        self.found_inf = None
        self.notes.clear()

    # -- zero_grad ---------------------------------------------------------------------------

    def zero_grad(self, original: Callable[[], Any], *, set_to_none: bool) -> Any:
        """Clear every gradient of this optimizer, the model's half ones included."""
        if not set_to_none:
            self.reset()
            return self.gradients.zero(original)
        self.gradients.drop()
        self.reset()
        return original()


def make_sessions(
    optimizers: Sequence[torch.optim.Optimizer],
    ops: Ops,
    name_of: NameOf,
    reductions: Reductions,
    *,
    has_masters: bool,
) -> dict[int, OptimizerSession]:
    """One session for each optimizer, by its ``id``; a weight in two of them has one master."""
    weights = Weights(ops, name_of)
    sessions: dict[int, OptimizerSession] = {}
    for optimizer in optimizers:
        masters = Masters(optimizer, weights) if has_masters else None
        sessions[id(optimizer)] = OptimizerSession(optimizer, ops, name_of, masters, reductions)
    return sessions
