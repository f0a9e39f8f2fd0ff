# SPDX-License-Identifier: BSD-3-Clause
"""``transformers.Trainer`` at an opt level of preamp."""

# The base class is of a package that may be missing where types are checked.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

from typing import Any

from preamp.engine import clip_grad_norm_, find_engine
from preamp.integrations.shared import (
    Options,
    check_sharding,
    framework,
    refuse_other_precision,
    refuse_own_updates,
    start,
    start_sharded,
)

_transformers: Any = framework("transformers.trainer", "transformers accelerate")
_any: Any = object  # for the type checker: a class of the framework comes after it


class TrainerMixin(_any):
    """What makes any ``Trainer`` train at an opt level; name it before that class.

    ``class MyTrainer(TrainerMixin, SFTTrainer)`` takes the arguments of both. The model and the
    optimizer are initialized when training begins; what is evaluated before is float32. The
    Trainer's checkpoints hold the exact float32 weights, and the loss scale with all counters in
    ``scaler.pt``. With ``fsdp`` in its arguments, version 2, the model is sharded first.

    Args:
        *args: For the Trainer.
        opt_level: Opt level of ``preamp.initialize``.
        options: Further arguments of ``preamp.initialize``, by name.
        **kwargs: For the Trainer; its arguments choose neither ``fp16`` nor ``bf16``.

    Raises:
        PreampStateError: They do, or DeepSpeed, or an ``fsdp_config`` that a level cannot have.
    """

    def __init__(
        self, *args: Any, opt_level: str = "O2", options: Options = None, **kwargs: Any
    ) -> None:
        """Make the Trainer."""
        super().__init__(*args, **kwargs)
        self._opt_level, self._preamp_options = opt_level, options
        for name in ("fp16", "bf16", "fp16_full_eval", "bf16_full_eval"):
            if getattr(self.args, name, False):
                refuse_other_precision(f"TrainingArguments({name}=True)")
        if self.is_deepspeed_enabled:
            refuse_own_updates("DEEPSPEED")
        if self.is_fsdp_enabled:
            check_sharding(self.accelerator.state.fsdp_plugin, options)
        self._earlier: dict[str, Any] | None = None

    def create_optimizer(self, model: Any = None) -> Any:
        """Make the optimizer as the Trainer does, and initialize it with the model.

        Under FSDP that waits for `create_scheduler`, before which Accelerate shards the model. A
        second call of ``train`` lets it find the model's own parameters in the optimizer again.
        """
        optimizer = super().create_optimizer(model)
        engine = find_engine(optimizer)
        if self.is_fsdp_enabled:
            if engine is not None:
                self._earlier = engine.state_dict()
                engine.close()
        elif engine is None:
            own = self.model if model is None else model
            self.accelerator.scaler = start(
                [own], [optimizer], self._opt_level, self._preamp_options
            )
        return optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the schedule as the Trainer does, after what FSDP has sharded is initialized."""
        is_ready = self.is_fsdp_enabled and self.accelerator._optimizers
        if is_ready and find_engine(self.optimizer) is None:
            start_sharded(self.accelerator, self._opt_level, self._preamp_options)
            if self._earlier is not None:
                self.accelerator.scaler.engine.load_state_dict(self._earlier)
                self._earlier = None
        return super().create_scheduler(num_training_steps, optimizer)

    def _clip_grad_norm(self, model: Any) -> Any:
        return clip_grad_norm_(model.parameters(), self.args.max_grad_norm)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:  # without clipping it is only measured
            grad_norm = clip_grad_norm_(model.parameters(), float("inf"))
        return super()._get_grad_norm(model, grad_norm=grad_norm)


class Trainer(TrainerMixin, _transformers.Trainer):
    """A ``transformers.Trainer`` at an opt level; see `TrainerMixin`."""
