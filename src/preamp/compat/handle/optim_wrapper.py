# SPDX-License-Identifier: BSD-3-Clause
"""An optimizer that scales its own losses, as ``handle.wrap_optimizer`` returns."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from preamp.compat.handle.backward import scaled_backward, skip_next_step
from preamp.core.errors import bad_state, bad_value, worded
from preamp.engine.params import first_device
from preamp.scaling import LossScaler


class Handle(Protocol):
    """What a wrapper asks of the handle that made it."""

    def scales_losses(self) -> bool:
        """Whether losses are scaled."""
        ...

    def new_scaler(self, device: torch.device) -> LossScaler:
        """Make a scaler with the handle's rule."""
        ...

    def remove_cache(self, param: torch.Tensor) -> None:
        """Forget a cast of ``param``."""

    def clear_cache(self) -> None:
        """Forget all casts."""


class OptimWrapper:
    """Scales the losses of one optimizer, ``num_loss`` of them in turn between two steps.

    Every other attribute is the optimizer's own.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, amp_handle: Handle, num_loss: int = 1
    ) -> None:
        """Wrap ``optimizer``, which stays as it is.

        Raises:
            ValueError: ``num_loss`` is not a positive integer.
        """
        if isinstance(num_loss, bool) or num_loss < 1:
            raise bad_value(
                f"num_loss={num_loss!r} is not possible",
                "It is the number of losses between two steps, 1 or more",
                "Count the scale_loss blocks before each optimizer.step()",
            )
        self._optimizer = optimizer
        self._handle = amp_handle
        device = first_device((), (optimizer,))
        self._loss_scaler = [amp_handle.new_scaler(device) for _ in range(num_loss)]
        self._loss_idx = 0
        self._overflows: list[Callable[[], bool]] = []

    @contextmanager
    def scale_loss(self, loss: torch.Tensor) -> Generator[torch.Tensor]:
        """Scale the next loss; after the block its gradients are unscaled, the earlier ones added.

        Args:
            loss: Floating tensor; call ``backward`` on what is yielded.

        Yields:
            ``loss`` in float32 times its scale; ``loss`` itself where amp is off.

        Raises:
            PreampStateError: More losses than ``num_loss`` since the last step.
            TypeError: ``loss`` is not a floating-point tensor.

        Mutates:
            Gradients and the loss's scale; an overflow makes the next `step` do nothing.
        """
        if not self._handle.scales_losses():
            yield loss
            return
        if self._loss_idx >= len(self._loss_scaler):
            raise bad_state(
                f"scale_loss was entered {self._loss_idx + 1} times since the last step",
                f"This optimizer was wrapped for {len(self._loss_scaler)} loss(es) a step",
                "Pass num_loss to wrap_optimizer, or call optimizer.step() in between",
            )
        scaler = self._loss_scaler[self._loss_idx]
        with scaled_backward(loss, self._optimizer, scaler) as (scaled, overflowed):
            yield scaled
        self._overflows.append(overflowed)
        self._loss_idx += 1
        self._handle.clear_cache()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step, unless a loss since the last step overflowed. Synchronises.

        Raises:
            NotImplementedError: A closure was passed; it would need to be run again at lower
                scales, which ``amp.initialize`` does.
        """
        if not self._handle.scales_losses():
            return self._optimizer.step() if closure is None else self._optimizer.step(closure)
        if closure is not None:
            raise worded(
                NotImplementedError,
                "step() of a wrapped optimizer was given a closure",
                "It takes none",
                "Use amp.initialize and amp.scale_loss, which run closures",
            )
        overflows, self._overflows, self._loss_idx = self._overflows, [], 0
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                self._handle.remove_cache(param)
        if any(overflowed() for overflowed in overflows):
            skip_next_step(self._optimizer)
        return self._optimizer.step()

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # not there yet: while copying or unpickling
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __repr__(self) -> str:
        return repr(self._optimizer)
