# SPDX-License-Identifier: BSD-3-Clause
"""An ``OptimWrapper`` of mmengine at an opt level, and what several processes need beside it."""

# The base class is of a package that may be missing where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from preamp.core.errors import bad_state
from preamp.engine import clip_grad_norm_, find_engine
from preamp.integrations.shared import EngineScaler, Options, framework, start

_hooks: Any = framework("mmengine.hooks", "mmengine")
_model: Any = framework("mmengine.model", "mmengine")
_optim: Any = framework("mmengine.optim", "mmengine")
_registry: Any = framework("mmengine.registry", "mmengine")


@_registry.OPTIM_WRAPPERS.register_module()
class PreampOptimWrapper(_optim.OptimWrapper):
    """An ``OptimWrapper`` that initializes model and optimizer before the first iteration.

    In a configuration: ``custom_imports=dict(imports=["preamp.integrations.mmengine"])`` and
    ``optim_wrapper=dict(type="PreampOptimWrapper", opt_level="O2", optimizer=dict(…))``.
    Accumulation, clipping and the runner's checkpoints are mmengine's; these hold exact float32
    weights, and the loss scale with all counters beside the optimizer's state. On several processes
    O2, O3 and O5 need `PreampDistributedDataParallel`.

    Args:
        optimizer: The optimizer.
        opt_level: Opt level of ``preamp.initialize``.
        options: Further arguments of ``preamp.initialize``, by name.
        **kwargs: For ``OptimWrapper``: ``accumulative_counts``, ``clip_grad``.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        opt_level: str = "O2",
        options: Options = None,
        **kwargs: Any,
    ) -> None:
        """Wrap ``optimizer``; nothing is initialized yet."""
        super().__init__(optimizer=optimizer, **kwargs)
        self._opt_level, self._preamp_options = opt_level, options
        self._scaler: EngineScaler | None = None
        self._loaded: dict[str, Any] | None = None  # before there is a scaler to take it

    @contextmanager
    def optim_context(self, model: nn.Module) -> Generator[None]:
        """Initialize ``model`` at the first call; in the block it runs its forward.

        Raises:
            PreampStateError: It is wrapped for several processes already, and the level casts
                weights.
        """
        if self._scaler is None:
            self._start(model)
        with super().optim_context(model):
            yield

    def _start(self, model: nn.Module) -> None:
        inner: Any = model.module if _model.is_model_wrapper(model) else model
        if find_engine(self.optimizer) is not None:
            self._scaler = EngineScaler(self.optimizer)
        elif inner is not model and self._opt_level not in ("O0", "O1", "O4"):
            raise bad_state(
                f"The runner has wrapped the model in {type(model).__name__} before level "
                f"{self._opt_level!r} could cast its weights",
                "Levels that cast weights have to do so before the model is wrapped",
                'Write model_wrapper_cfg = dict(type="PreampDistributedDataParallel") in the '
                'configuration, or pass opt_level="O1", or "O4" for bfloat16',
            )
        else:
            self._scaler = start([inner], [self.optimizer], self._opt_level, self._preamp_options)
        if self._loaded is not None:
            self._scaler.load_state_dict(self._loaded)
            self._loaded = None

    def _started(self) -> EngineScaler:
        if self._scaler is None:
            raise bad_state(
                "PreampOptimWrapper.backward or step was called before the first optim_context",
                "That block initializes the model with its optimizer",
                "Run the forward in: with optim_wrapper.optim_context(model)",
            )
        return self._scaler

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run the backward of ``loss`` times the loss scale."""
        self._started().scale(loss).backward(**kwargs)
        self._inner_count += 1

    def step(self, **kwargs: Any) -> None:
        """Clip if asked for, and step unless gradients overflowed; then adjust the loss scale."""
        scaler = self._started()
        if self.clip_grad_kwargs:
            self._clip_grad()
        scaler.step(self.optimizer, **kwargs)
        scaler.update()

    def _clip_grad(self) -> None:
        if self.grad_name == "grad_norm":
            norm = clip_grad_norm_(self.optimizer, **self.clip_grad_kwargs)
            self.message_hub.update_scalar(f"train/{self.grad_name}", float(norm))
        else:
            self._started().unscale_(self.optimizer)
            super()._clip_grad()

    def state_dict(self) -> dict[str, Any]:
        """The state of ``OptimWrapper``, and under ``"preamp"`` that of the scaler."""
        state = super().state_dict()
        scaler = self._loaded if self._scaler is None else self._scaler.state_dict()
        return {**state, "preamp": scaler} if scaler else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or the state of a plain ``OptimWrapper``."""
        rest = dict(state_dict)
        found = rest.pop("preamp", None)
        if found is not None and self._scaler is not None:
            self._scaler.load_state_dict(found)
        else:
            self._loaded = found
        super().load_state_dict(rest)


@_registry.HOOKS.register_module()
class PreampParamSchedulerHook(_hooks.ParamSchedulerHook):
    """Lets schedules by iteration wait when a step is skipped, as mmengine's own do not.

    In a configuration:
    ``default_hooks=dict(param_scheduler=dict(type="PreampParamSchedulerHook"))``.
    It synchronises in each iteration, but not at static loss scales.
    """

    def after_train_iter(self, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Step the schedules by iteration, unless this one's step was skipped."""
        engine, wrapper = find_engine(runner.model), runner.optim_wrapper
        # With accumulation not every iteration has a step.
        has_stepped = not isinstance(wrapper, _optim.OptimWrapper) or wrapper.should_update()
        if engine is None or not (has_stepped and engine.last_step_skipped):
            super().after_train_iter(runner, *args, **kwargs)


@_registry.MODEL_WRAPPERS.register_module()
class PreampDistributedDataParallel(nn.Module):
    """Puts off mmengine's ``MMDistributedDataParallel`` until the weights have been cast.

    mmengine wraps a model before it makes the optimizer, and what ``DistributedDataParallel`` has
    wrapped can no longer be cast. In a configuration:
    ``model_wrapper_cfg = dict(type="PreampDistributedDataParallel")``. It serves any optimizer
    wrapper that initializes in its first ``optim_context``: `PreampOptimWrapper`, and mmengine's
    ``ApexOptimWrapper``.

    Args:
        module: The model, on its device.
        broadcast_buffers: As in ``MMDistributedDataParallel``; off, as in a runner's own wrapper.
        **kwargs: For ``MMDistributedDataParallel``: ``find_unused_parameters`` and others.
    """

    def __init__(self, module: nn.Module, broadcast_buffers: bool = False, **kwargs: Any) -> None:
        """Keep ``module`` as it is until the first `train_step`."""
        super().__init__()
        self.module: Any = module
        self._arguments = {"broadcast_buffers": broadcast_buffers, **kwargs}
        # A second wrapper around `module`, so not among the modules in this one
        self._wrapped: list[Any] = []

    def train_step(self, data: Any, optim_wrapper: Any) -> dict[str, torch.Tensor]:
        """Train on ``data``; all processes wrap the model together when this is called first."""
        if not self._wrapped:
            with optim_wrapper.optim_context(self.module):
                pass  # it initializes the model, at levels that cast weights too
            self._wrapped = [_model.MMDistributedDataParallel(self.module, **self._arguments)]
            self.train(self.training)
        return self._wrapped[0].train_step(data, optim_wrapper)

    def val_step(self, data: Any) -> list[Any]:
        """The model's predictions for ``data`` of a validation set."""
        return self.module.val_step(data)

    def test_step(self, data: Any) -> list[Any]:
        """The model's predictions for ``data`` of a test set."""
        return self.module.test_step(data)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model, within ``DistributedDataParallel`` once there is one."""
        return (self._wrapped or [self.module])[0](*args, **kwargs)

    def train(self, mode: bool = True) -> PreampDistributedDataParallel:
        """Set training mode, or evaluation mode, of the model and its wrappers."""
        super().train(mode)
        for wrapped in self._wrapped:
            wrapped.train(mode)
        return self
