# SPDX-License-Identifier: BSD-3-Clause
"""``apex.fp16_utils.FP16_Optimizer``: masters and loss scaling around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from preamp.compat.amp_state import amp_state
from preamp.compat.fp16_utils.half_params import HalfParams, ScaledGradients
from preamp.compat.fp16_utils.scaling import (
    make_scaler,
    scaler_from,
    scaler_state,
    set_scale,
    state_of,
)
from preamp.compat.fp16_utils.skips import MAX_SKIPS, endless_overflow
from preamp.compat.scaler import LossScaler
from preamp.compat.wrapper import (
    OptimizerWrapper,
    check_loss,
    check_masters,
    check_optimizer,
    check_state,
)
from preamp.core.errors import bad_state
from preamp.core.log import say
from preamp.engine.optimizer_hooks import excuse_scheduler
from preamp.kernels import backend

Closure = Callable[[], Any]
Params = list[torch.Tensor]

_KEYS = (
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
)
"""What a saved state has to have."""


class FP16_Optimizer(OptimizerWrapper):
    """Gives the half parameters of an optimizer float32 masters, and scales the loss.

    For scripts that use it already; new ones have `preamp.initialize` with O2 or O5. Call
    ``optimizer.backward(loss)`` instead of ``loss.backward()``, and clip with
    `clip_master_grads`. Any optimizer of torch works, LBFGS with a closure included, on any
    device. It is no ``torch.optim.Optimizer`` itself: schedulers take ``optimizer.optimizer``.

    Several `backward` calls before a `step` are summed, also if the loss scale changes in
    between. A static loss scale does not look for overflow.

    Attributes:
        optimizer: The inner optimizer; it holds the masters.
        loss_scaler: The scaler under the names of ``apex.amp.scaler.LossScaler``.
        dynamic_loss_scale: Whether the scale reacts to overflows.
        overflow: Whether the latest gradients overflowed, so that `step` will not take them.
        first_closure_call_this_step: Whether `step` has not called its closure yet.
        fp16_groups: The model's half parameters, by group.
        fp32_from_fp16_groups: Their masters.
        fp32_from_fp32_groups: The parameters without a master.
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Make the masters; ``init_optimizer`` gets them in place of the half parameters.

        Args:
            init_optimizer: Mutated. Its state moves along.
            static_loss_scale: Constant loss scale.
            dynamic_loss_scale: Start at 65536, halve on overflow, double after 2000 clean steps.
            dynamic_loss_args: Any of ``init_scale``, ``scale_factor``, ``scale_window``,
                ``min_loss_scale`` and ``max_loss_scale``; ignored unless dynamic.
            verbose: Print the parameters that are taken in.

        Raises:
            TypeError: Not an optimizer, a parameter that cannot be trained, or an unknown option.
            ValueError: A number cannot be used.
            PreampStateError: The optimizer went through ``initialize``, or is wrapped already.
        """
        check_optimizer(init_optimizer)
        core = make_scaler(
            static_loss_scale, dynamic=bool(dynamic_loss_scale), options=dynamic_loss_args
        )
        self._params = HalfParams(init_optimizer, backend())
        super().__init__(init_optimizer)
        self.fp16_groups = self._params.fp16_groups
        self.fp32_from_fp16_groups = self._params.fp32_from_fp16_groups
        self.fp32_from_fp32_groups = self._params.fp32_from_fp32_groups
        self._gradients = ScaledGradients(self._params, backend())
        self._skips_in_row = 0
        self._use_scaler(core)
        self._updates = 0
        self.overflow = False
        self.first_closure_call_this_step = True
        if verbose:
            for index, group in enumerate(self.param_groups):
                say(f"FP16_Optimizer processing param group {index}:")
                for param in group["params"]:
                    say(f"FP16_Optimizer received {param.dtype} with {tuple(param.shape)}")

    def _use_scaler(self, core: Any) -> None:
        self._core = core
        self.loss_scaler = LossScaler.of(core)
        self.dynamic_loss_scale: bool = core.is_dynamic

    @property
    def loss_scale(self) -> float:
        """The current loss scale. Writing sets it."""
        return self._core.value()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        set_scale(self._core, value)
        self._gradients.follow(self.loss_scale)

    @property
    def all_fp16_params(self) -> Params:
        """The model's half parameters."""
        return self._params.halves

    @property
    def all_fp32_from_fp16_params(self) -> Params:
        """Their masters."""
        return self._params.masters

    @property
    def all_fp32_from_fp32_params(self) -> Params:
        """The parameters without a master."""
        return self._params.directs

    def _optimizer_params(self) -> Params:
        return [param for group in self.param_groups for param in group["params"]]

    # -- gradients -------------------------------------------------------------------------------

    def zero_grad(self, set_grads_to_None: bool = False) -> None:
        """Fill all gradients, of masters too, with zeros; ``set_grads_to_None`` drops them."""
        for param in (*self._optimizer_params(), *self._params.halves):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()
        self._gradients.forget()

    def backward(
        self, loss: torch.Tensor, update_master_grads: bool = True, retain_graph: bool = False
    ) -> None:
        """Run backward on the scaled loss.

        Args:
            loss: Scalar tensor; taken in float32 (float64 stays) times the loss scale.
            update_master_grads: Call `update_master_grads` afterwards. With False, gradients of
                several backwards pile up scaled, which saves the unscaling; call it after the last.
            retain_graph: As in ``Tensor.backward``.

        Raises:
            TypeError: ``loss`` is not a floating tensor.
        """
        check_loss(loss)
        self._params.adopt()
        self._gradients.begin(self.loss_scale)
        scaled: Any = self._core.scale_loss(loss)
        scaled.backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    def update_master_grads(self) -> None:
        """Unscale the gradients into the masters, look for overflow, adjust the loss scale.

        A master's gradient becomes that of its half parameter, ``None`` if it has none. With a
        dynamic loss scale this synchronises once.
        """
        self._params.adopt()
        found_inf = self._gradients.finish(self.loss_scale, looks=self.dynamic_loss_scale)
        if found_inf is not None:
            self._core.record(found_inf)
        self.overflow = bool(self._core.update().item() != 0)
        self._gradients.follow(self.loss_scale)
        self._updates += 1

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> torch.Tensor | float:
        """Clip the gradients of everything the optimizer updates to a common norm.

        Args:
            max_norm: Largest norm.
            norm_type: Kind of norm; 2 or ``inf``, for example.

        Returns:
            The norm before clipping, a scalar tensor; -1 after an overflow.

        Raises:
            PreampStateError: A backward's gradients have not reached the masters yet.
        """
        self._check_updated("clip_master_grads")
        if self.overflow:
            return -1
        return torch.nn.utils.clip_grad_norm_(self._optimizer_params(), max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[torch.Tensor | None]] | None:
        """Return the unscaled gradients by group, ``None`` for parameters without one.

        Returns:
            ``None`` instead, with a printed warning, after an overflow.

        Raises:
            PreampStateError: A backward's gradients have not reached the masters yet.
        """
        self._check_updated("inspect_master_grad_data")
        if self.overflow:
            say("Warning: the gradients overflowed, so there are no master gradients to inspect")
            return None
        return [
            [None if param.grad is None else param.grad.detach() for param in group["params"]]
            for group in self.param_groups
        ]

    def _check_updated(self, what: str) -> None:
        if self._gradients.is_pending:
            raise bad_state(
                f"{what} was called while gradients had not reached the masters",
                "A backward with update_master_grads=False, or one that failed, is followed by "
                "update_master_grads() or zero_grad()",
                "Call optimizer.update_master_grads() after the last backward",
            )

    # -- step ------------------------------------------------------------------------------------

    def step(self, closure: Closure | None = None) -> Any:
        """Step the inner optimizer and round the masters into the model, or skip it on overflow.

        Args:
            closure: For optimizers that evaluate the loss themselves: clears the gradients, calls
                ``optimizer.backward(loss)`` and returns the loss. It is called again, at the
                lower loss scale, as long as its gradients overflow.

        Returns:
            What the inner optimizer's ``step`` returns; ``None`` if it was skipped.

        Raises:
            LossScaleError: Overflows do not end, whatever the loss scale.
            PreampStateError: A backward's gradients have not reached the masters, or ``closure``
                did not call ``optimizer.backward``.
        """
        if closure is None:
            self._check_updated("step")
            if self.overflow:
                excuse_scheduler(self.optimizer, self.optimizer.step)
                self._skip()
                return None
        self._params.absorb()
        result = self.optimizer.step() if closure is None else self._step_with(closure)
        self._params.write_halves()
        self._skips_in_row = 0
        return result

    def _skip(self) -> None:
        """Tell of a skipped step, at amp's verbosity, or that it was the last one."""
        self._skips_in_row += 1
        if amp_state.verbosity:
            say(f"Gradient overflow.  Skipping step, reducing loss scale to {self.loss_scale}")
        if self._skips_in_row >= MAX_SKIPS:
            halves = dict(zip(self._params.masters, self._params.halves, strict=True))
            groups = self.optimizer.param_groups
            params = [[halves[p] if p in halves else p for p in g["params"]] for g in groups]
            raise endless_overflow(self._skips_in_row, self.loss_scale, params)

    def _step_with(self, closure: Closure) -> Any:
        def evaluate() -> Any:
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:  # the optimizer moved the masters since
                self._params.write_halves()
            loss = self._call(closure)
            while self.overflow:
                self._skip()
                loss = self._call(closure)
            return loss

        try:
            return self.optimizer.step(evaluate)
        finally:
            self.first_closure_call_this_step = True

    def _call(self, closure: Closure) -> Any:
        updates = self._updates
        loss = closure()
        if updates == self._updates:
            raise bad_state(
                "The closure given to FP16_Optimizer.step made no gradients",
                "It calls optimizer.backward(loss), with update_master_grads left on",
                "Replace loss.backward() in it by optimizer.backward(loss)",
            )
        return loss

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything that resuming needs as plain data, under Apex's keys.

        Loads with ``torch.load(weights_only=True)``. Tensors are not copied.

        Returns:
            ``loss_scaler`` (a dict of numbers), ``dynamic_loss_scale``, ``overflow``,
            ``first_closure_call_this_step``, ``optimizer_state_dict``, and ``fp32_from_fp16``,
            the masters by group.
        """
        self._params.absorb()
        return {
            "loss_scaler": dict(state_of(self._core)),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [
                [master.detach() for master in group] for group in self.fp32_from_fp16_groups
            ],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, here or in Apex.

        The half parameters are rounded from the loaded masters, so that the model need not be
        loaded. The loss scale and its kind are those of the checkpoint.

        Args:
            state_dict: ``loss_scaler`` may also be the object that Apex put there, as
                ``torch.load(path, weights_only=False)`` reads it under the alias.

        Raises:
            TypeError: ``state_dict`` is not a mapping.
            ValueError: An entry is missing or unreadable, or groups or shapes differ; nothing
                was applied.
        """
        check_state(state_dict, _KEYS, "fp16_utils.FP16_Optimizer")
        masters: Sequence[Sequence[torch.Tensor]] = state_dict["fp32_from_fp16"]
        shapes = [[tuple(master.shape) for master in group] for group in masters]
        wanted = [[tuple(own.shape) for own in group] for group in self.fp32_from_fp16_groups]
        check_masters("masters of shapes", shapes, wanted)
        scaler = scaler_from(scaler_state(state_dict["loss_scaler"]))
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        with torch.no_grad():
            values = (master for group in masters for master in group)
            for master, value in zip(self._params.masters, values, strict=True):
                master.copy_(value)
        self._params.write_halves()
        self._use_scaler(scaler)
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
