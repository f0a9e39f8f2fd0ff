# SPDX-License-Identifier: BSD-3-Clause
"""One optimizer's way through a training step: READY → SCALED → UNSCALED → READY."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from preamp.engine import refusals
from preamp.engine.overflow import GradientNote
from preamp.engine.stage import Delayed, Stage
from preamp.kernels import Ops
from preamp.optim import DirectGradients, MasterParameter, Masters, cast_state
from preamp.scaling import LossScaler

NameOf = Callable[[torch.Tensor], str]
_NOTES_KEPT = 64  # backwards between two steps that an overflow message can still look back on


class OptimizerSession:
    """The gradients of one optimizer, and its masters if the policy wants them.

    Attributes:
        optimizer: The user's optimizer.
        masters: Its float32 masters, or ``None`` at levels without.
        stage: Where the gradients stand.
        notes: What the backwards since the last step found, for overflow messages.
        backwards: Backwards collected so far.
        steps_applied: Steps that updated the weights.
        steps_skipped: Steps not taken because of overflow.
        skips_in_row: Skipped steps since the last applied one.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, ops: Ops, name_of: NameOf, *, use_masters: bool
    ) -> None:
        """Take over the bookkeeping of ``optimizer``; makes no masters yet."""
        self.optimizer = optimizer
        self.masters = Masters(optimizer, ops, name_of) if use_masters else None
        self.stage = Stage.READY
        self.notes: list[GradientNote] = []
        self.backwards = 0
        self.steps_applied = 0
        self.steps_skipped = 0
        self.skips_in_row = 0
        self._ops = ops
        self._name_of = name_of
        self._direct = DirectGradients(ops)
        self._found_inf: torch.Tensor | None = None
        self._delayed: Delayed | None = None
        self._open = False  # inside a scale_loss block

    # -- parameters --------------------------------------------------------------------------

    def _params(self) -> Iterator[torch.Tensor]:
        for group in self.optimizer.param_groups:
            yield from group["params"]

    def direct_params(self) -> list[torch.Tensor]:
        """The parameters that the optimizer updates without a master."""
        return [param for param in self._params() if not isinstance(param, MasterParameter)]

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
        for param in self._params():
            if param in state and isinstance(state[param], dict):
                cast_state(state[param], param)

    def adopt(self, originals: Mapping[int, torch.Tensor] | None = None) -> None:
        """Make masters for half parameters that need one and have none.

        Args:
            originals: Their float32 values from before a cast, by ``id(parameter)``.
        """
        if self.masters is not None:
            self.masters.adopt(originals)

    # -- one backward ------------------------------------------------------------------------

    def needs_bookkeeping(self, scaler: LossScaler) -> bool:
        """Whether a backward with ``scaler`` has to be prepared and cleaned up after at all."""
        return not (scaler.is_identity and self.masters is None and self.stage is not Stage.SCALED)

    def begin_backward(self, scaler: LossScaler) -> None:
        """Set earlier gradients aside. Mutates the parameters' ``grad``."""
        self.adopt()
        self._forget_abandoned()
        if self._delayed is not None:
            if self._delayed.continues_with(scaler):
                self._open = True
                return  # raw gradients of one scale may pile up in place
            self._settle_delayed()
        if self._found_inf is not None and not self._holds_gradients():
            self._found_inf = None  # the overflowed gradients were dropped: a fresh start
            self.notes.clear()
        for twin in self.masters or ():
            twin.reconcile()  # all may refuse before anything is moved
        for twin in self.masters or ():
            twin.set_aside()
        self._direct.set_aside(self.direct_params())
        self._open = True

    def leave_block(self) -> None:
        """The block ended in an error that nothing can be restored after."""
        self._open = False

    def abort_backward(self) -> None:
        """The body raised: drop its gradients, restore those from before."""
        if not self._open:
            return
        self._open = False
        if self._delayed is not None:
            return  # nothing was set aside; what autograd added stays, as without preamp
        for twin in self.masters or ():
            twin.put_back()
        self._direct.put_back(self.direct_params())

    def delay(self, scaler: LossScaler) -> None:
        """Leave the gradients scaled; a later `collect` unscales them all."""
        self._open = False
        if self._delayed is None:
            inverse = None if scaler.is_identity else scaler.inverse()
            self._delayed = Delayed(scaler, scaler.generation, inverse)
        self._delayed.has_gradients |= self._holds_raw_gradients()
        self.stage = Stage.SCALED

    def refuse_nested(self) -> None:
        """Raise `PreampStateError` if this optimizer is in a ``scale_loss`` block already.

        Both blocks would unscale the same gradients.
        """
        if self._open:
            raise refusals.nested(self.optimizer)

    def _holds_raw_gradients(self) -> bool:
        halves = (twin.half for twin in self.masters or ())
        return any(param.grad is not None for param in (*self.direct_params(), *halves))

    def _forget_abandoned(self) -> None:
        """Forget a delayed accumulation whose gradients the script has dropped since."""
        if self._delayed is None or not self._delayed.has_gradients or self._holds_raw_gradients():
            return
        for twin in self.masters or ():
            twin.drop()
        self._direct.forget()
        self.reset()

    def collect(
        self, scaler: LossScaler, note: GradientNote, claimed: set[int]
    ) -> torch.Tensor | None:
        """Unscale this backward's gradients and add the earlier ones.

        Args:
            scaler: The loss's scaler.
            note: Filled with what the census finds.
            claimed: ``id`` of parameters already handled for another optimizer; extended.

        Returns:
            float32 scalar on the device, 1.0 if any new gradient is infinite or nan; ``None``
            for static scales, which do not look.
        """
        direct = [param for param in self.direct_params() if id(param) not in claimed]
        claimed.update(map(id, direct))
        found_inf = None
        if scaler.is_dynamic:
            twins = {id(twin.master): twin.half for twin in self.masters or ()}
            own = {id(param): param for param in direct} | twins
            params = [own[id(param)] for param in self._params() if id(param) in own]
            fresh = [(param, param.grad) for param in params if param.grad is not None]
            census = self._ops.census([grad for _, grad in fresh], scaler.device)
            note.add([param for param, _ in fresh], census.max_abs)
            found_inf = census.found_inf
        self._merge(direct, None if scaler.is_identity else scaler.inverse())
        return found_inf

    def _merge(self, direct: list[torch.Tensor], factor: torch.Tensor | None) -> None:
        self._direct.merge(direct, factor)
        factors: dict[torch.device, torch.Tensor] = {}
        for twin in self.masters or ():
            device = twin.half.device  # a factor elsewhere would make clipping wait for a copy
            if device not in factors:
                one = torch.ones((), device=device)
                factors[device] = one if factor is None else factor.to(device)
            twin.collect(factors[device], is_plain=factor is None)
        self._open = False
        self.stage = Stage.UNSCALED
        self.backwards += 1
        self._delayed = None

    def _settle_delayed(self) -> None:
        """Unscale delayed gradients by the scale they carry, since the next one differs."""
        delayed = self._delayed
        if delayed is None:
            return
        params = self.direct_params()
        halves = [twin.half for twin in self.masters or ()]
        self.refuse_sparse()
        if delayed.scaler.is_dynamic:
            grads = [p.grad for p in (*params, *halves) if p.grad is not None]
            found_inf = self._ops.census(grads, delayed.scaler.device).found_inf
            delayed.scaler.record(found_inf)
            self.remember(found_inf, None)
        self._merge(params, delayed.inverse)

    def remember(self, found_inf: torch.Tensor, note: GradientNote | None) -> None:
        """Keep an overflow until the next step, whichever optimizer's gradients showed it.

        Args:
            found_inf: float32 scalar, not zero if this optimizer's next step must be skipped.
            note: What to tell about it.
        """
        if self._found_inf is not None:
            found_inf = torch.maximum(self._found_inf.to(found_inf.device), found_inf)
        self._found_inf = found_inf
        if note is not None:
            self.notes = [*self.notes[-_NOTES_KEPT + 1 :], note]

    def _holds_gradients(self) -> bool:
        """Whether gradients from before are left; those that the script zeroed do not count."""
        return self._direct.holds_gradient(self.direct_params()) or any(
            twin.holds_gradient for twin in self.masters or ()
        )

    def refuse_sparse(self) -> None:
        """Raise `PreampStateError` if a parameter with a master has a sparse gradient."""
        for twin in self.masters or ():
            if twin.half.grad is not None and twin.half.grad.is_sparse:
                raise refusals.sparse_with_master(twin.name)

    # -- one step ----------------------------------------------------------------------------

    def overflowed(self) -> bool:
        """Whether the gradients at hand contain an overflow. Synchronises if any was possible."""
        if self._found_inf is None or self._found_inf.item() != 0:
            return self._found_inf is not None
        self._found_inf = None  # known to be clean: not asked for again
        return False

    def check_unscaled(self) -> None:
        """Refuse to step with gradients that still carry the loss scale."""
        self._forget_abandoned()
        if self.stage is Stage.SCALED:
            raise refusals.still_scaled()

    def prepare_step(self) -> None:
        """Bring masters up to date with what the user did to the half weights."""
        self.check_unscaled()
        if self.masters is not None:
            self.masters.adopt()
            self.masters.absorb_external_writes()

    def write_halves(self) -> None:
        """Round the masters into the half weights."""
        if self.masters is not None:
            self.masters.write_halves()

    def finish_step(self, *, skipped: bool) -> None:
        """Count the step and use the gradients up."""
        self.steps_skipped += int(skipped)
        self.steps_applied += int(not skipped)
        self.skips_in_row = self.skips_in_row + 1 if skipped else 0
        for twin in self.masters or ():
            twin.spend()
        self.reset()

    def reset(self) -> None:
        """Back to READY: no overflow, nothing delayed."""
        self.stage = Stage.READY
        self._found_inf = None
        self._delayed = None
        self.notes.clear()

    # -- zero_grad ---------------------------------------------------------------------------

    def zero_grad(self, original: Callable[[], Any], *, set_to_none: bool) -> Any:
        """Clear every gradient of this optimizer, the model's half ones included."""
        for twin in self.masters or ():
            if set_to_none:
                twin.drop()
            else:
                twin.zero_half_gradient()
        self._direct.forget()
        self.reset()
        return original()
