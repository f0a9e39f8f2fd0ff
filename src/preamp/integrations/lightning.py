# SPDX-License-Identifier: BSD-3-Clause
"""Precision plugins for Lightning's Trainer and for Fabric."""

# The base class is of a package that may be missing where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from preamp.core.errors import bad_state
from preamp.core.undo import set_attribute
from preamp.engine import Engine, clip_grad_norm_, engine_of, find_engine, serve_imitations
from preamp.integrations.shared import EngineScaler, Options, framework, start

_trainer: Any = framework("lightning.pytorch.plugins.precision", "lightning")
_fabric: Any = framework("lightning.fabric.plugins.precision", "lightning")
_callbacks: Any = framework("lightning.pytorch.callbacks", "lightning")
_AVERAGING = tuple(
    getattr(_callbacks, name)
    for name in ("WeightAveraging", "StochasticWeightAveraging")
    if hasattr(_callbacks, name)
)
_READ_WEIGHTS = (
    *("on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end", "on_train_end"),
    *("on_validation_epoch_start", "on_validation_epoch_end"),
)


class TrainerPrecision(_trainer.Precision):
    """A precision plugin: ``Trainer(plugins=TrainerPrecision(opt_level="O2"))``.

    The LightningModule and its optimizers are initialized when ``fit`` has set them up, and given
    back when it ends: the module is plain float32 again then, with the exact weights. Validation
    within ``fit`` runs at the opt level; ``validate``, ``test`` and ``predict`` by themselves run
    in float32, since without an optimizer there are no masters to keep the weights exact.

    Lightning's callbacks ``WeightAveraging`` (``EMAWeightAveraging``) and
    ``StochasticWeightAveraging`` average the masters, within ``engine.exact_weights()``.

    Checkpoints hold the exact float32 weights, and the loss scale with all counters under this
    class's name. A learning-rate scheduler that counts optimizer steps sees skipped ones where the
    LightningModule's ``lr_scheduler_step`` calls ``preamp.step_scheduler(scheduler,
    self.optimizers())``.

    Args:
        opt_level: Opt level of ``preamp.initialize``.
        options: Further arguments of ``preamp.initialize``, by name.
    """

    def __init__(self, opt_level: str = "O2", options: Options = None) -> None:
        """Note what to do; nothing is initialized yet."""
        super().__init__()
        # training_step may call a part of the module, or a function, rather than the module
        self._options = {"scope": "thread", **(options or {})}
        self._opt_level = opt_level
        self._scaler: EngineScaler | None = None
        self._state: Mapping[str, Any] = {}  # of the latest run, and one yet to be taken over

    def connect(
        self, model: nn.Module, optimizers: list[Any], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Any], list[Any]]:
        """Initialize ``model`` with its optimizers, if there are any."""
        if optimizers:
            is_wrapped = isinstance(model, DistributedDataParallel)
            module: Any = model.module if is_wrapped else model
            self._scaler = start([module], optimizers, self._opt_level, self._options)
            serve_imitations(self._scaler.engine)  # of which Lightning makes wrappers next
            _average_masters(module.trainer.callbacks, self._scaler.engine)
            if is_wrapped and engine_of(module).policy.cast_model_type is not None:
                model = _wrapped_again(module)
        return super().connect(model, optimizers, lr_schedulers)

    def pre_backward(self, tensor: torch.Tensor, module: Any) -> Any:
        """Multiply the loss by the loss scale."""
        if self._scaler is not None:
            tensor = self._scaler.scale(tensor)
        return super().pre_backward(tensor, module)

    def optimizer_step(
        self, optimizer: Any, model: Any, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Run the closure, clip, and step unless gradients overflowed.

        Raises:
            PreampStateError: The optimizer runs its closure several times in a step.
        """
        scaler = self._scaler
        if scaler is None:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise bad_state(
                "An LBFGS optimizer was given to Lightning with an opt level of preamp",
                "Lightning clips and steps after one run of the closure",
                "Choose another optimizer, or write the loop with preamp.scale_loss",
            )
        result = closure()
        is_empty = result is None and model.automatic_optimization  # training_step left it out
        if not is_empty:
            scaler.unscale_(optimizer)  # hooks read and change gradients now
        self._after_closure(model, optimizer)
        if is_empty:
            return result
        taken = scaler.step(optimizer, **kwargs)
        scaler.update()
        return taken

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """Clip as ``preamp.clip_grad_norm_``."""
        if self._scaler is None:
            super().clip_grad_by_norm(optimizer, clip_val)
        else:
            clip_grad_norm_(optimizer, clip_val)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and the counters, as plain data."""
        return dict(self._state if self._scaler is None else self._scaler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, or the state of Lightning's ``MixedPrecision``."""
        if self._scaler is not None and state_dict:
            self._scaler.load_state_dict(state_dict)

    def teardown(self) -> None:
        """Give the module and its optimizers back, in float32."""
        if self._scaler is not None:
            self._state = self._scaler.state_dict()
            self._scaler.engine.close()
            self._scaler = None
        super().teardown()


def _average_masters(callbacks: Iterable[Any], engine: Engine) -> None:
    """Let Lightning's callbacks that average weights, and swap the average in, see masters.

    They walk over the module's parameters and write through ``.data``: half weights would lose
    the average's digits, and at the end of the training the masters are given back.
    """
    for callback in callbacks:
        for name in _READ_WEIGHTS if isinstance(callback, _AVERAGING) else ():
            inside = partial(_within_exact_weights, engine, getattr(callback, name))
            set_attribute(callback, name, inside, engine.undo)


def _within_exact_weights(engine: Engine, hook: Callable[..., Any], *args: Any) -> Any:
    with engine.exact_weights():
        return hook(*args)


def _wrapped_again(module: Any) -> nn.Module:
    """Wrap ``module`` anew: the hooks of the first wrapper went with its float32 weights."""
    strategy = module.trainer.strategy
    strategy.model = module
    strategy.configure_ddp()
    return strategy.model


class FabricPrecision(_fabric.Precision):
    """A precision plugin for Fabric, ``Fabric(plugins=FabricPrecision())``.

    Fabric shows a plugin no optimizers when it wraps a model, so the script calls
    ``preamp.initialize(model, optimizer, opt_level=…)`` before ``fabric.setup(model, optimizer)``,
    on the device where they stay. Where a script sets both up apart, ``setup_module`` comes before
    ``setup_optimizers``: a wrapper made earlier has no part in the engine. Save
    ``precision.state_dict()`` with the rest.
    """

    def __init__(self) -> None:
        """Wait for a model."""
        super().__init__()
        self._scaler: EngineScaler | None = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Find the engine of ``module``.

        Raises:
            PreampStateError: It has an engine of another ``preamp.initialize`` than an earlier one.
        """
        engine = find_engine(module)
        if engine is None or not engine.optimizers:
            return module  # a teacher, for example
        if self._scaler is not None and self._scaler.engine is not engine:
            raise bad_state(
                "Fabric was given models of different engines",
                "Fabric scales every loss with one loss scale",
                "Initialize them together: preamp.initialize([model_a, model_b], [optimizer_a, …])",
            )
        self._scaler = EngineScaler(engine.optimizers)
        serve_imitations(engine)  # of which Fabric makes wrappers next
        return module

    def _started(self) -> EngineScaler:
        if self._scaler is None:
            raise bad_state(
                "Fabric was given no model that went through preamp.initialize",
                "FabricPrecision works for models and optimizers that have an engine",
                "Call preamp.initialize(model, optimizer, opt_level=…) before "
                "fabric.setup(model, optimizer)",
            )
        return self._scaler

    def backward(self, tensor: torch.Tensor, model: Any, *args: Any, **kwargs: Any) -> None:
        """Run the backward of ``tensor`` times the loss scale."""
        super().backward(self._started().scale(tensor), model, *args, **kwargs)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step unless gradients overflowed; then adjust the loss scale."""
        taken = self._started().step(optimizer, **kwargs)
        self._started().update()
        return taken

    def main_params(self, optimizer: Any) -> Iterator[torch.Tensor]:
        """What the optimizer updates: float32 masters in the place of half weights."""
        for group in optimizer.param_groups:
            yield from group["params"]

    def unscale_gradients(self, optimizer: Any) -> None:
        """Unscale, for Fabric to clip."""
        self._started().unscale_(optimizer)

    def state_dict(self) -> dict[str, Any]:
        """The loss scale and the counters, as plain data."""
        return self._started().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self._started().load_state_dict(state_dict)
