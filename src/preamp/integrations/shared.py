# SPDX-License-Identifier: BSD-3-Clause
"""What all integrations share: the framework's package, the engine, and its state in one place."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_state, unavailable
from preamp.engine import Engine, GradScaler, initialize

Options = Mapping[str, Any] | None
"""Further arguments of ``preamp.initialize``, by name."""


def framework(module: str, package: str) -> Any:
    """Import ``module`` of a framework, which pip installs as ``package``.

    Raises:
        PreampUnavailableError: It is not installed, or importing it failed.
    """
    root = module.partition(".")[0]
    try:
        importlib.import_module(root)  # by itself, so that the error names it where it is missing
        return importlib.import_module(module)
    except ImportError as error:
        names = {root, *package.split()}
        if not (isinstance(error, ModuleNotFoundError) and error.name in names):
            raise unavailable(
                f"Importing {module} failed ({error})",
                "This part of preamp works inside that framework, which must be imported first",
                f'Mend the installation until python -c "import {module}" ends without an error',
            ) from error
        raise unavailable(
            f"Cannot import {module} ({error})",
            f"This part of preamp works inside that framework, which is the package {package}",
            f"Run pip install {package}",
        ) from error


class EngineScaler(GradScaler):
    """A `GradScaler` for frameworks, whose state has that of the whole engine with it.

    Frameworks save one state of a scaler, and nothing else that belongs to an engine.
    """

    @property
    def engine(self) -> Engine:
        """The engine behind it."""
        return self._engine

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        """Accelerate calls it before it loads an optimizer; here the engine's scale is made."""

    def state_dict(self) -> dict[str, Any]:
        """The state of a ``torch.amp.GradScaler``, and under ``"preamp"`` scales and counters."""
        state = super().state_dict()
        return {**state, "preamp": self._engine.state_dict()} if state else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, or a state of torch's scaler.

        Raises:
            RuntimeError: ``state_dict`` is empty, and this one is enabled.
            ValueError: It cannot be read; nothing was taken over.
        """
        super().load_state_dict(state_dict)
        if self.is_enabled() and "preamp" in state_dict:
            self._engine.load_state_dict(state_dict["preamp"])


def start(
    models: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    opt_level: str,
    options: Options,
) -> EngineScaler:
    """Initialize models with their optimizers; returns the scaler for the framework's loop."""
    initialize(list(models), list(optimizers), opt_level=opt_level, **(options or {}))
    return EngineScaler(optimizers)


def start_sharded(accelerator: Any, opt_level: str, options: Options) -> None:
    """Initialize what ``accelerator`` has prepared under FSDP2, and give it the scaler.

    Masters take the place of parameters in the optimizer, where Accelerate looks for those that it
    is about to shard. So it shards first, and its optimizers, made by then, get their scaler late.
    """
    wrapped = accelerator._optimizers
    updated = {id(p) for one in wrapped for group in one.param_groups for p in group["params"]}
    models = [  # a teacher among those that were prepared stays as it is
        model
        for model in {id(model): model for model in accelerator._models}.values()
        if any(id(param) in updated for param in model.parameters())
    ]
    scaler = start(models, wrapped, opt_level, options)
    accelerator.scaler = scaler
    for optimizer in wrapped:
        optimizer.__setstate__({"scaler": scaler})  # has it keep its ways to step, as unpickling


def refuse_other_precision(what: str) -> None:
    """Raise `PreampStateError`: ``what`` asks the framework for a precision of its own."""
    raise bad_state(
        f"{what} was asked for, and an opt level of preamp",
        "Only one of the two can decide about dtypes and scale losses",
        "Leave the framework's precision at float32, and choose opt_level: O1 and O2 are float16, "
        "O4 and O5 bfloat16",
    )


def refuse_own_updates(strategy: str) -> None:
    """Raise `PreampStateError`: ``strategy`` of Accelerate keeps and updates weights by itself."""
    raise bad_state(
        f"Accelerate runs {strategy}, and an opt level of preamp was asked for",
        "It has weights, gradients and steps of its own there, and masters of preamp would have no "
        "part in them; DistributedDataParallel and FSDP2 leave all three to torch",
        "Choose MULTI_GPU or MULTI_CPU in the launcher's configuration, or FSDP with "
        "fsdp_version 2 for a model that fits no device",
    )


def check_sharding(plugin: Any, options: Options) -> None:
    """Refuse what a ``FullyShardedDataParallelPlugin`` asks for and an opt level cannot have.

    Raises:
        PreampStateError: It is of the first FSDP, keeps parameters on the host, or has a policy
            that says more than the dtype of reductions; or masters were to lie on the host.
    """
    who = "FullyShardedDataParallelPlugin"
    if plugin.fsdp_version != 2:
        raise bad_state(
            f"{who}(fsdp_version={plugin.fsdp_version}) was asked for, and an opt level of preamp",
            "The first FSDP has flat parameters, which do not tell which ranks hold the rest of "
            "them; torch has deprecated it for fully_shard",
            "Pass fsdp_version=2; in the launcher's or the Trainer's configuration, the version 2",
        )
    if type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy":
        raise bad_state(
            f"{who}(cpu_offload=True) was asked for, and an opt level of preamp",
            "Weights, masters and the optimizer's state stay on the device, each rank's part of "
            "them; no other place was ever tried under FSDP",
            "Leave cpu_offload out; options={'storage': 'split'}, or 'compact' with a fused "
            "optimizer, take less memory",
        )
    if getattr((options or {}).get("storage"), "place", "device") == "host":
        raise bad_state(
            'options has a storage with place="host", and the framework shards the model',
            "It gathers masters and moments by the device's own collectives, which do not reach "
            "the host",
            'Pass a storage with place="device", or call fully_shard in a loop of your own',
        )
    policy = plugin.mixed_precision_policy
    for name in ("param_dtype", "output_dtype"):
        if getattr(policy, name, None) is not None:
            raise bad_state(
                f"A mixed_precision_policy with {name}={dtype_name(getattr(policy, name))} was "
                "asked for, and an opt level of preamp",
                "The level decides about weights, inputs and outputs, and the policy at most about "
                "the reduction of gradients",
                "Leave it out, or pass MixedPrecisionPolicy(reduce_dtype=torch.float32) alone",
            )
