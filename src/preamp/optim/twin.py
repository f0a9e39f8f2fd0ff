# SPDX-License-Identifier: BSD-3-Clause
"""A half parameter and its float32 master: one weight in two precisions.

The master's gradient is lazy. After a backward the half gradient stays where autograd put it, on
the half parameter, and the twin only notes its scale. Reading ``master.grad`` unscales it into
float32 then; a script that never reads it never pays for it.

What the script does to the half gradient in between counts: setting it to ``None`` drops the
gradient, zeroing it zeroes it. Any other change is refused while a loss scale is on it, since
clipping a scaled gradient would be wrong without anyone noticing.
"""

from __future__ import annotations

import torch

from preamp.core.tensors import WeightMark, stored_grad, version_of
from preamp.kernels import Ops
from preamp.optim import half_gradient
from preamp.optim.half_gradient import HalfGradient, TwinMemo, nothing_more, unscaled
from preamp.optim.master_parameter import master_parameter
from preamp.optim.part import Holding

_BOOKS = ("_is_carried", "_open", "_ops", "_raw", "_rounded", "_seen", "_written", "_zeros_aside")


class Twin:
    """Binds a half parameter to its master and keeps the books on their gradients.

    Attributes:
        half: The model's parameter, float16 or bfloat16.
        master: The optimizer's parameter, float32.
        name: Qualified name for messages.
        is_shared: Whether several optimizers update the master.
        held: How much of the weight the master has, and the gradient.
    """

    __slots__ = ("half", "held", "is_shared", "master", "name", *_BOOKS)

    def __init__(self, half: torch.nn.Parameter, data: torch.Tensor, name: str, ops: Ops) -> None:
        """Make the master of ``half``.

        Args:
            half: Half parameter of the model.
            data: float32 tensor that becomes the master's storage; not copied.
            name: Qualified name for messages.
            ops: Back end for the arithmetic.
        """
        self.half = half
        self.name = name
        self._ops = ops
        self.master = master_parameter(data, requires_grad=half.requires_grad)
        self.master.twin = self
        self._seen: HalfGradient | None = None
        # While a backward is under way its half gradient is scaled and incomplete: nobody's yet.
        self._open = self._is_carried = self._zeros_aside = False
        self._rounded: int | None = None  # the master's version when an update rounded it
        self._raw: int | None = None
        self.is_shared = False
        self._written = WeightMark(half)
        self.held = Holding(self.master, half, name)

    # -- gradients ---------------------------------------------------------------------------

    @property
    def pending(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The half gradient and its factor, if it is not in the master's gradient yet."""
        if self._open:
            return None
        self.reconcile()
        if self._seen is None or self._seen.factor is None:
            return None
        return self._seen.tensor, self._seen.factor

    @property
    def _is_bare(self) -> bool:
        """Whether the half parameter has no gradient, and had none when last looked at."""
        return self.half.grad is None and self._seen is None

    @property
    def holds_gradient(self) -> bool:
        """Whether either side has a gradient that the script has not dropped or zeroed."""
        self.reconcile()
        if self.held.gradient is not None:
            return True
        return self._seen is not None and not self._seen.is_zeroed

    def stand_in(self) -> None:
        """Give a parameter that got no new gradient zeros for one, if it has an earlier one.

        The earlier one is in the master; without anything on the model's side, a script that
        drops the model's gradients could not reach it.
        """
        if self.half.grad is not None:
            return
        is_stored = self.held.gradient is not None
        if is_stored or self._zeros_aside:
            self.half.grad = zeros = torch.zeros_like(self.half)
            if not self._open:
                self._seen = nothing_more(zeros) if is_stored else unscaled(zeros, is_zeroed=True)

    def collect(self, factor: torch.Tensor, *, is_plain: bool) -> None:
        """Note the half gradient as it is now; add nothing yet. Cannot fail.

        Args:
            factor: float32 scalar that unscales it.
            is_plain: Whether the factor is 1 and always was.
        """
        if self._is_carried:  # the half gradient holds the earlier one too
            self.held.keep(None)
        self.end()
        now = self.half.grad
        self._seen = None if now is None else HalfGradient(now, version_of(now), factor, is_plain)

    def replace_factor(self, factor: torch.Tensor) -> None:
        """Unscale a gradient that is still pending by ``factor`` instead; touches no memory."""
        if self._seen is not None:
            self._seen.clip(factor)

    @property
    def unscales(self) -> torch.Tensor | None:
        """What takes the loss scale from a pending gradient, without what clips it."""
        return None if self._seen is None else self._seen.unscales

    def gradient(self) -> torch.Tensor | None:
        """The whole unscaled float32 gradient, made if need be."""
        self.materialize()
        return self.held.gradient

    def own_gradient(self) -> torch.Tensor | None:
        """What the optimizer reads as the master's gradient; see `Holding.own_gradient`."""
        if self.held.part is None:
            return self.gradient()
        return self.held.own_gradient(self.pending, self.gradient, self._ops)

    def materialize(self) -> None:
        """Bring the master's gradient up to date: ``grad += float32(half.grad) * factor``."""
        pending = None if self._is_bare else self.pending
        if pending is None or self._seen is None:
            return
        half_grad, factor = pending
        base = self.held.gradient
        wide = self._ops.widen_add([half_grad], [factor], [base])[0]
        self._seen.factor = None
        self._seen.is_alone = base is None
        if base is None:
            self.held.keep(wide)

    @property
    def has_aside(self) -> bool:
        """Whether a backward is under way and an earlier gradient is away meanwhile."""
        return self._open and not self._is_carried and self.held.gradient is not None

    def note_raw(self) -> None:
        """A block ends that leaves its gradient scaled: remember it as it is."""
        grad = self.half.grad
        self._raw = None if grad is None else version_of(grad)

    def reconcile_raw(self) -> None:
        """Take in that the script dropped or zeroed a gradient left scaled, and so all of it."""
        raw, now = self._raw, self.half.grad
        if raw is None:
            return
        if now is None or (version_of(now) != raw and not bool(now.any())):
            self.held.keep(None)

    def set_aside(self, carry: torch.Tensor | float | None = None) -> None:
        """Begin a backward: move what is known to the master's gradient, clear the half one.

        Args:
            carry: Scale of the coming backward if the earlier gradient must be in the half one
                too; see `DirectGradients`.
        """
        if self._is_bare and self.held.gradient is None:  # as after most steps
            self._open, self._zeros_aside = True, False
            return
        self.reconcile()
        zeroed = self._seen is not None and self._seen.is_zeroed
        if not zeroed or self.held.gradient is not None:  # nothing is added to zeros
            self.materialize()
        base = self.held.gradient
        self.forget_half_gradient()
        self._zeros_aside = zeroed and base is None
        self._open = True
        if carry is not None and base is not None:
            self._is_carried = True
            self.half.grad = (base * carry).to(self.half.dtype)

    def put_back(self) -> None:
        """The backward failed: drop what it left; the master's gradient has the earlier value."""
        if self._open:
            zeros = self._zeros_aside
            self.forget_half_gradient()
            self._zeros_aside = zeros
            self.end()

    def drop(self) -> None:
        """Clear both gradients."""
        self.forget_half_gradient()
        self.held.keep(None)

    def end(self) -> None:
        """No backward is under way any more."""
        self._open = self._is_carried = False
        self._raw = None

    def spend(self) -> None:
        """After a step: the master's gradient goes, the half gradient stays but is used up.

        Not where another optimizer has yet to use it; there it stays until zeroed, as in torch.
        """
        if self.is_shared:
            return
        if self.held.part is not None or stored_grad(self.master) is not None:
            self.held.keep(None)
        grad = self.half.grad
        if grad is None:
            self._seen = None
        elif self._seen is None:
            self._seen = HalfGradient(grad, version_of(grad), None, is_plain=False, is_spent=True)
        else:
            self._seen.spend(grad)

    def take_zeros(self, grad: torch.Tensor) -> None:
        """``grad`` is zeros, and the gradient now."""
        self.half.grad = grad
        self._seen = unscaled(grad, is_zeroed=True)

    def forget_half_gradient(self) -> None:
        """The master's gradient was assigned: what the half gradient held no longer counts.

        Assigning ``None`` this way is how ``optimizer.zero_grad`` reaches the model's side.
        """
        self.half.grad = None
        self._seen = None
        self._zeros_aside = False

    def reconcile(self) -> None:
        """Take in what the script did to the half gradient since it was last looked at."""
        now, seen = self.half.grad, self._seen
        if now is None:
            if seen is not None:  # dropped by the script, so the master's goes too
                self._seen = None
                self.held.keep(None)
            return
        if seen is None:  # a backward outside scale_loss
            self._seen = unscaled(now)
            return
        if (now is seen.tensor and version_of(now) == seen.version) or seen.follow(now):
            return
        if not seen.may_be_read_again(now):
            if now is not seen.tensor or bool(now.any()):
                raise half_gradient.changed_in_place(now, self.name)
            # Zeros are a gradient, as in plain torch: momentum and weight decay go on.
            self.held.keep(None)
            self._seen = unscaled(now, is_zeroed=True)
            return
        if seen.factor is None:
            self.held.keep(None)
        self._seen = unscaled(now)

    def memo(self) -> TwinMemo:
        """What to keep beside the gradients, to go on from here in another process."""
        if not self._open:
            self.reconcile()
        is_raw = half_gradient.is_at(self._raw, self.half.grad)
        return TwinMemo(self._seen, is_raw, self._open, self._is_carried, self._zeros_aside)

    def recall(self, memo: TwinMemo) -> None:
        """Go on from there; the gradients are in place again."""
        self._seen, self._open, self._is_carried = memo.seen, memo.is_open, memo.is_carried
        self._zeros_aside = memo.zeros_aside
        self._raw = half_gradient.version_if(memo.is_raw, self.half.grad)

    # -- weights -----------------------------------------------------------------------------

    def note_written(self) -> None:
        """Remember that the half weight equals the rounded master as of now."""
        self._written.renew(self.half)

    def note_rounded(self) -> None:
        """The update itself has rounded the new master into the half weight."""
        self._written.advance(self.half)
        self._rounded = version_of(self.master)

    def take_rounded(self) -> bool:
        """Whether that happened since this was last asked, and no step hook changed the master."""
        rounded, self._rounded = self._rounded, None
        return rounded is not None and rounded == version_of(self.master)

    def absorb_external_write(self) -> None:
        """Take over what was written to the half weight behind the master's back.

        Without this the next step would restore the old value. Writes through ``p.data`` (but not
        assignments to it) do not raise the version and stay unseen.
        """
        if not self._written.is_of(self.half):
            self.held.take_over_written()
            self.note_written()
