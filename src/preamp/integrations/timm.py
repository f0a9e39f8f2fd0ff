# SPDX-License-Identifier: BSD-3-Clause
"""The ``loss_scaler`` of timm's training script."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from preamp.core.errors import bad_value
from preamp.engine import as_optimizers, clip_grad_norm_
from preamp.integrations.shared import EngineScaler, framework

_MODES = ("norm", "value", "agc")


class LossScaler:
    """In the place of timm's ``NativeScaler`` or ``ApexScaler``, for an initialized optimizer.

    timm's script calls it for each batch, hands its state to ``CheckpointSaver`` as ``amp_scaler``
    and takes it back from there on ``--resume``.

    Args:
        optimizer: Given to ``preamp.initialize`` with the model.
        loss_id: Which loss scale of the engine to use.

    Raises:
        PreampStateError: The optimizer has no engine.
    """

    state_dict_key = "amp_scaler"

    def __init__(self, optimizer: torch.optim.Optimizer, loss_id: int = 0) -> None:
        """Stand in front of the optimizer's engine."""
        self._scaler = EngineScaler(optimizer, loss_id)

    def __call__(
        self,
        loss: torch.Tensor,
        optimizer: torch.optim.Optimizer,
        clip_grad: float | None = None,
        clip_mode: str = "norm",
        parameters: Iterable[torch.Tensor] | None = None,
        create_graph: bool = False,
        need_update: bool = True,
    ) -> None:
        """Run the backward of ``loss``; clip and step too, unless more of the batch is to come.

        Args:
            loss: Scalar, on any device.
            optimizer: The one that this was made for.
            clip_grad: Largest norm, largest value, or factor of ``"agc"``; ``None`` clips nothing.
            clip_mode: ``"norm"``, ``"value"`` or ``"agc"``, as timm's ``--clip-mode``.
            parameters: What to clip; left out, everything that ``optimizer`` updates.
            create_graph: For ``backward``, as second-order optimizers need it.
            need_update: False accumulates.

        Raises:
            ValueError: ``clip_mode`` is not known.
            PreampUnavailableError: ``"agc"`` was asked for and timm is missing.

        Mutates:
            Gradients, weights and the loss scale.
        """
        if clip_mode not in _MODES:
            raise bad_value(
                f"clip_mode={clip_mode!r} is not known",
                f"Choose one of {', '.join(map(repr, _MODES))}",
                "Pass --clip-mode norm, or leave it out",
            )
        self._scaler.scale(loss).backward(create_graph=create_graph)
        if not need_update:
            return
        if clip_grad is not None:
            self._clip(optimizer, parameters, clip_grad, clip_mode)
        self._scaler.step(optimizer)
        self._scaler.update()

    def _clip(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[torch.Tensor] | None,
        value: float,
        mode: str,
    ) -> None:
        if mode == "norm":
            clip_grad_norm_(optimizer if parameters is None else parameters, value)
            return
        if parameters is None:
            (own,) = as_optimizers(optimizer)
            parameters = [param for group in own.param_groups for param in group["params"]]
        self._scaler.unscale_(optimizer)
        if mode == "value":
            torch.nn.utils.clip_grad_value_(parameters, value)
        else:
            framework("timm.utils.agc", "timm").adaptive_clip_grad(parameters, value)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and the counters, as plain data."""
        return self._scaler.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, or the state of timm's ``NativeScaler``."""
        self._scaler.load_state_dict(state_dict)
