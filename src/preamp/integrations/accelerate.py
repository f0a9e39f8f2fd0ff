# SPDX-License-Identifier: BSD-3-Clause
"""``accelerate.Accelerator`` at an opt level of preamp."""

# The base class is of a package that may be missing where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from preamp.core.errors import bad_state
from preamp.engine import clip_grad_norm_, clip_grad_value_
from preamp.engine.lookup import bare, find_engine
from preamp.integrations.shared import (
    EngineScaler,
    Options,
    check_sharding,
    framework,
    refuse_other_precision,
    refuse_own_updates,
    start,
    start_sharded,
)

_accelerate: Any = framework("accelerate", "accelerate")
_OWN_UPDATES = ("DEEPSPEED", "MEGATRON_LM", "XLA", "TP")


class Accelerator(_accelerate.Accelerator):
    """An ``accelerate.Accelerator`` whose ``prepare`` initializes models and optimizers.

    Everything else is Accelerate's: ``backward``, ``accumulate``, schedulers that pause with a
    skipped step, ``save_state`` and ``load_state``. Checkpoints hold the exact float32 weights, and
    the loss scale with all counters in the scaler's file. Under FSDP2 ``prepare`` shards the model
    first, and initializes each rank's part of it.

    Args:
        *args: For ``accelerate.Accelerator``.
        opt_level: Opt level of ``preamp.initialize``.
        options: Further arguments of ``preamp.initialize``, by name.
        **kwargs: For ``accelerate.Accelerator``; ``mixed_precision`` stays ``"no"``, whatever a
            configuration of the launcher says.

    Raises:
        PreampStateError: ``mixed_precision`` is another, or the launcher chose a strategy that
            updates weights by itself, or the plugin for FSDP asks for what a level cannot have.
    """

    def __init__(
        self, *args: Any, opt_level: str = "O2", options: Options = None, **kwargs: Any
    ) -> None:
        """Make Accelerate's own, in float32."""
        asked = kwargs.pop("mixed_precision", None)
        if asked not in (None, "no"):
            refuse_other_precision(f"mixed_precision={asked!r}")
        given = inspect.signature(super().__init__).bind_partial(*args, **kwargs).arguments
        if given.get("fsdp_plugin") is not None:  # before the process has an AcceleratorState
            check_sharding(given["fsdp_plugin"], options)
        super().__init__(*args, mixed_precision="no", **kwargs)
        self._opt_level, self._preamp_options = opt_level, options
        self.scaler: EngineScaler | None = None
        kind = self.distributed_type.value
        if kind in _OWN_UPDATES:
            refuse_own_updates(kind)
        if kind == "FSDP":
            check_sharding(self.state.fsdp_plugin, options)

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Initialize the models and optimizers among ``args``, then prepare all as Accelerate does.

        Models without an optimizer stay as they are: a teacher, for example. Under FSDP2 Accelerate
        prepares first: it takes one model with its optimizers, and shards the model.

        Raises:
            PreampStateError: An optimizer comes without its model, or in a second call, or under
                FSDP2 after ``preamp.initialize``.
        """
        models = [arg for arg in args if isinstance(arg, nn.Module)]
        given = [arg for arg in args if isinstance(bare(arg), torch.optim.Optimizer)]
        optimizers = [optimizer for optimizer in given if find_engine(optimizer) is None]
        if self.is_fsdp2 and any(find_engine(arg) is not None for arg in args):
            raise bad_state(
                "prepare was given a model or an optimizer that has an engine of preamp already",
                "Under FSDP2 parameters are sharded first, and initialized once",
                "Leave preamp.initialize to prepare, and pass each object to it once",
            )
        if optimizers and (not models or self.scaler is not None):
            raise bad_state(
                "prepare was given an optimizer "
                + ("without its model" if not models else "after an earlier one"),
                "All models and optimizers that train together are prepared in one call, since "
                "they share a loss scale",
                "Write model, optimizer = accelerator.prepare(model, optimizer)",
            )
        if optimizers and not self.is_fsdp2:
            if self.device_placement:  # masters are made where the weights are
                for model in models:
                    model.to(self.device)
            self.scaler = start(models, optimizers, self._opt_level, self._preamp_options)
        prepared = super().prepare(*args, device_placement=device_placement)
        if optimizers and self.is_fsdp2:
            start_sharded(self, self._opt_level, self._preamp_options)
        return prepared

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
        """Clip each value as ``preamp.clip_grad_value_``, which unscales by itself."""
        if self.scaler is None or not self.scaler.is_enabled():
            super().clip_grad_value_(parameters, clip_value)
        else:
            clip_grad_value_(parameters, clip_value)
