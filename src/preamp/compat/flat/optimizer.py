# SPDX-License-Identifier: BSD-3-Clause
"""``FP16_Optimizer`` as ``apex.optimizers`` had it until 2019: flat masters, own scale rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from preamp.compat.flat.buffers import FlatGroup, check_group
from preamp.compat.flat.refusals import (
    check_elementwise,
    check_groups_unchanged,
    check_scale_arguments,
    is_usable,
)
from preamp.compat.fp16_utils.skips import MAX_SKIPS, endless_overflow
from preamp.compat.wrapper import (
    OptimizerWrapper,
    check_loss,
    check_masters,
    check_optimizer,
    check_state,
)
from preamp.core.errors import bad_value
from preamp.core.log import say
from preamp.engine.optimizer_hooks import excuse_scheduler
from preamp.kernels import backend
from preamp.optim.fused.adam import FusedAdam

Grads = list[torch.Tensor | None]

_KEYS = ("dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict", "fp32_groups_flat")
_DYNAMIC_KEYS = ("last_overflow_iter", "scale_factor", "scale_window")


class FP16_Optimizer(OptimizerWrapper):
    """Keeps each group's parameters in one buffer, with one float32 master for the inner optimizer.

    The inner optimizer works element by element, since a group is one tensor to it, and gets the
    unscaled gradient in ``master.grad``. A ``FusedAdam`` follows the formula of early 2019, with
    its clipping, per group.

    Overflow is looked for with a static scale too, and the step skipped. A parameter without a
    gradient keeps its value, weight decay or not, though the inner optimizer's moments see a zero;
    a group without any gradient is left out altogether.

    Attributes:
        optimizer: The inner optimizer.
        fp16_groups: The model's parameters, by group.
        fp16_groups_flat: Their buffers; the parameters' data are views of them.
        fp32_groups_flat: The masters, one for each group.
        cur_scale: The loss scale.
        cur_iter: Steps so far, skipped ones included.
        dynamic_loss_scale: Whether the scale reacts to overflows.
        last_overflow_iter: ``cur_iter`` of the latest skipped step; only if dynamic.
        scale_factor: What the scale is multiplied or divided by; only if dynamic.
        scale_window: Steps without overflow before it grows; only if dynamic.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Lay the parameters out; ``init_optimizer`` gets the masters in their place.

        Args:
            init_optimizer: Mutated. It has made no step yet.
            static_loss_scale: Constant loss scale; ignored if dynamic.
            dynamic_loss_scale: Start at 65536, halve on overflow but not below 1, double after
                1000 clean steps.
            dynamic_loss_args: Any of ``init_scale``, ``scale_factor`` and ``scale_window``;
                ignored unless dynamic.
            verbose: Tell of steps that a dynamic scale skipped.

        Raises:
            TypeError: Not an elementwise optimizer, a group of several dtypes or devices, or an
                unknown option.
            ValueError: A number cannot be used, or an option of a ``FusedAdam``.
            PreampStateError: The optimizer has made steps, went through ``initialize``, or is
                wrapped already.
        """
        check_optimizer(init_optimizer)
        check_elementwise(init_optimizer)
        options = check_scale_arguments(
            1.0 if dynamic_loss_scale else static_loss_scale,
            dynamic_loss_args if dynamic_loss_scale else None,
        )
        for index, group in enumerate(init_optimizer.param_groups):
            check_group(group["params"], index)
        if isinstance(init_optimizer, FusedAdam):
            init_optimizer.follow_early_formula("the FP16_Optimizer")
        self._ops = backend()
        self._groups = [
            FlatGroup(group["params"], self._ops) for group in init_optimizer.param_groups
        ]
        for group, own in zip(init_optimizer.param_groups, self._groups, strict=True):
            group["params"] = [own.master]
        super().__init__(init_optimizer)
        self.fp16_groups = [group.params for group in self._groups]
        self.fp16_groups_flat = [group.flat for group in self._groups]
        self.fp32_groups_flat = [group.master for group in self._groups]
        self._skips_in_row = 0
        self.verbose = verbose
        self.cur_iter = 0
        self.dynamic_loss_scale = bool(dynamic_loss_scale)
        if dynamic_loss_scale:
            self.cur_scale = options["init_scale"]
            self.last_overflow_iter = -1
            self.scale_factor = options["scale_factor"]
            self.scale_window = options["scale_window"]
        else:
            self.cur_scale = float(static_loss_scale)

    def zero_grad(self, set_grads_to_None: bool = True) -> None:
        """Drop the model's gradients; fill them with zeros if ``set_grads_to_None`` is false."""
        for param in (param for group in self._groups for param in group.params):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def backward(self, loss: torch.Tensor) -> None:
        """Run backward on ``loss``, in float32 (float64 stays), times ``cur_scale``.

        Raises:
            TypeError: ``loss`` is not a floating tensor.
        """
        check_loss(loss)
        wide = loss if loss.dtype is torch.float64 else loss.float()
        scaled: Any = wide * self.cur_scale
        scaled.backward()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the inner optimizer and round the masters into the model, or skip it on overflow.

        Synchronises once, to learn the norms and whether there is an overflow.

        Args:
            closure: Called once before, if given: clears the gradients, calls `backward` and
                returns the loss. Apex ignored it.

        Returns:
            What ``closure`` returned, or ``None``.

        Raises:
            LossScaleError: 50 steps in a row overflowed.
            PreampStateError: A parameter left for another dtype or device, or groups changed.
        """
        check_groups_unchanged(self.param_groups, self.fp32_groups_flat)
        for group in self._groups:
            group.check_bound()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self._groups:
            group.absorb()
        grads = [group.flat_gradient() for group in self._groups]
        if self._have_overflowed(grads):
            self._skip()
            return loss
        idle = [piece for group in self._groups for piece in group.idle_values()]
        self._step_inner(grads)
        for piece, value in idle:
            piece.copy_(value)
        for group in self._groups:
            group.write_flat()
        self._skips_in_row = 0
        self._update_scale(False)
        return loss

    def _have_overflowed(self, grads: Grads) -> bool:
        """Whether any value of the scaled gradients, or a group's norm, is infinite or nan."""
        present = [grad for grad in grads if grad is not None]
        if not present:
            return False
        device = present[0].device
        found = [self._ops.census(present, device).found_inf]
        found += [self._ops.l2norm([grad], [None], device) for grad in present]
        overflow, *norms = cast("list[float]", cast("Any", torch.stack(found)).tolist())
        return bool(overflow) or not all(map(math.isfinite, norms))

    def _step_inner(self, grads: Grads) -> None:
        for grad, master in zip(grads, self.fp32_groups_flat, strict=True):
            if grad is not None:
                inverse = torch.tensor(1.0 / self.cur_scale, device=grad.device)
                master.grad = self._ops.widen_add([grad], [inverse], [None])[0]
        try:
            self.optimizer.step()
        finally:
            for master in self.fp32_groups_flat:
                master.grad = None

    def _skip(self) -> None:
        excuse_scheduler(self.optimizer, self.optimizer.step)
        self._update_scale(True)
        self._skips_in_row += 1
        if self._skips_in_row >= MAX_SKIPS:
            raise endless_overflow(self._skips_in_row, self.cur_scale, self.fp16_groups)

    def _update_scale(self, skip: bool) -> None:
        if skip and (self.verbose or not self.dynamic_loss_scale):
            kind = "dynamic" if self.dynamic_loss_scale else "static"
            say(f"\nGrad overflow on iteration {self.cur_iter}")
            say(f"Using {kind} loss scale of {self.cur_scale}")
        if self.dynamic_loss_scale:
            if skip:
                self.cur_scale = max(self.cur_scale / self.scale_factor, 1.0)
                self.last_overflow_iter = self.cur_iter
            elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1

    def state_dict(self) -> dict[str, Any]:
        """Return everything that resuming needs as plain data, under Apex's keys.

        Loads with ``torch.load(weights_only=True)``. Tensors are not copied.

        Returns:
            ``dynamic_loss_scale``, ``cur_scale``, ``cur_iter``, with a dynamic scale
            ``last_overflow_iter``, ``scale_factor`` and ``scale_window``,
            ``optimizer_state_dict``, and ``fp32_groups_flat``, the masters.
        """
        for group in self._groups:
            group.check_bound()
        for group in self._groups:
            group.absorb()
        names = _KEYS[:3]
        if self.dynamic_loss_scale:
            names += _DYNAMIC_KEYS
        state = {name: getattr(self, name) for name in names}
        state["optimizer_state_dict"] = self.optimizer.state_dict()
        state["fp32_groups_flat"] = [master.detach() for master in self.fp32_groups_flat]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, here or in Apex.

        The model's parameters are rounded from the loaded masters, so that it need not be loaded.

        Raises:
            TypeError: ``state_dict`` is not a mapping.
            ValueError: An entry is missing or unusable, or groups or sizes differ; nothing was
                applied.
            PreampStateError: A parameter left for another dtype or device.
        """
        fields, masters = _checked_state(state_dict, self.fp32_groups_flat)
        for group in self._groups:
            group.check_bound()
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        for name, value in fields.items():
            setattr(self, name, value)
        for group, value in zip(self._groups, masters, strict=True):
            group.absorb()
            with torch.no_grad():
                group.master.copy_(value)
            group.write_flat()


def _checked_state(
    state: Mapping[str, Any], own: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Return the attributes and masters of a state, of ours or Apex's, if they fit ``own``."""
    check_state(state, _KEYS, "the flat FP16_Optimizer")
    names = _KEYS[:3] + (_DYNAMIC_KEYS if state["dynamic_loss_scale"] else ())
    check_state(state, names, "the flat FP16_Optimizer")
    masters: list[torch.Tensor] = [master.detach() for master in state["fp32_groups_flat"]]
    shapes, wanted = ([tuple(master.shape) for master in each] for each in (masters, own))
    check_masters("flat masters of shapes", shapes, wanted)
    fields = {name: state[name] for name in names}
    for name, value in fields.items():
        is_count = name in ("cur_iter", "last_overflow_iter")
        is_number = isinstance(value, (int, float)) and (is_count or is_usable(value))
        if name != "dynamic_loss_scale" and not is_number:
            raise bad_value(
                f"The state has {name}={value!r}",
                "Scales and windows are finite numbers above 0, and steps are numbers",
                "Pass what state_dict() returned; nothing was loaded",
            )
    return fields, masters
