# SPDX-License-Identifier: BSD-3-Clause
"""``accelerate.Accelerator`` at an opt level of preamp."""

# The base class is of a package that may be missing where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_state
from preamp.engine import clip_grad_norm_
from preamp.engine.lookup import find_engine, is_optimizer
from preamp.integrations.shared import (
    EngineScaler,
    Options,
    framework,
    refuse_other_precision,
    start,
)

_accelerate: Any = framework("accelerate", "accelerate")
_SHARDED = ("DEEPSPEED", "FSDP", "MEGATRON_LM", "XLA", "TP")


class Accelerator(_accelerate.Accelerator):
    """An ``accelerate.Accelerator`` whose ``prepare`` initializes models and optimizers.

    Everything else is Accelerate's: ``backward``, ``accumulate``, schedulers that pause with a
    skipped step, ``save_state`` and ``load_state``. Checkpoints hold the exact float32 weights, and
    the loss scale with all counters in the scaler's file.

    Args:
        *args: For ``accelerate.Accelerator``.
        opt_level: Opt level of ``preamp.initialize``.
        options: Further arguments of ``preamp.initialize``, by name.
        **kwargs: For ``accelerate.Accelerator``; ``mixed_precision`` stays ``"no"``, whatever a
            configuration of the launcher says.

    Raises:
        PreampStateError: ``mixed_precision`` is another, or the launcher chose a strategy that
            shards or updates weights by itself.
    """

    def __init__(
        self, *args: Any, opt_level: str = "O2", options: Options = None, **kwargs: Any
    ) -> None:
        """Make Accelerate's own, in float32."""
        asked = kwargs.pop("mixed_precision", None)
        if asked not in (None, "no"):
            refuse_other_precision(f"mixed_precision={asked!r}")
        super().__init__(*args, mixed_precision="no", **kwargs)
        self._opt_level, self._preamp_options = opt_level, options
        self.scaler: EngineScaler | None = None
        kind = self.distributed_type.value
        if kind in _SHARDED:
            raise bad_state(
                f"Accelerate runs {kind}, and an opt level of preamp was asked for",
                "Several processes are possible with DistributedDataParallel",
                "Choose MULTI_GPU or MULTI_CPU in the launcher's configuration",
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Initialize the models and optimizers among ``args``, then prepare all as Accelerate does.

        Models without an optimizer stay as they are: a teacher, for example.

        Raises:
            PreampStateError: An optimizer comes without its model, or in a second call.
        """
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        optimizers = [arg for arg in args if is_optimizer(arg) and find_engine(arg) is None]
        if optimizers:
            self._start(models, optimizers)
        return super().prepare(*args, device_placement=device_placement)

    def _start(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
        if not models or self.scaler is not None:
            raise bad_state(
                "prepare was given an optimizer "
                + ("without its model" if not models else "after an earlier one"),
                "All models and optimizers that train together are prepared in one call, since "
                "they share a loss scale",
                "Write model, optimizer = accelerator.prepare(model, optimizer)",
            )
        if self.device_placement:  # masters are made where the weights are
            for model in models:
                model.to(self.device)
        self.scaler = start(models, optimizers, self._opt_level, self._preamp_options)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale the gradients of ``optimizer``, or of all; see ``preamp.GradScaler.unscale_``."""
        if self.scaler is None:
            return
        several = isinstance(optimizer, (list, tuple))
        given: Iterable[Any] = cast("Any", optimizer) if several else [optimizer]
        for one in self._optimizers if optimizer is None else given:
            self.scaler.unscale_(one)

    def clip_grad_norm_(
        self,
        parameters: Iterable[torch.Tensor] | torch.Tensor,
        max_norm: float,
        norm_type: float = 2,
    ) -> torch.Tensor:
        """Clip as ``preamp.clip_grad_norm_``, which unscales by itself; returns the norm."""
        if self.scaler is None or not self.scaler.is_enabled():
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def clip_grad_value_(
        self, parameters: Iterable[torch.Tensor] | torch.Tensor, clip_value: float
    ) -> None:
        """Clip each value of unscaled gradients, in the dtype of the weights."""
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)
