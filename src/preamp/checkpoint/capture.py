# SPDX-License-Identifier: BSD-3-Clause
"""The content of a checkpoint: everything that training goes on from, as plain data."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from preamp.checkpoint.subjects import MasterShards, Subjects, check_reduced, class_name, params_of
from preamp.core.dtypes import dtype_name
from preamp.engine import Engine
from preamp.engine.pending import check_outside_blocks, pending_state
from preamp.kernels import fsdp
from preamp.optim import leaf_of

_DEVICES = ("cuda", "xpu", "mps")


def random_states() -> dict[str, Any]:
    """Return the states of all generators that are in use, as plain data. May synchronise."""
    version, numbers, gauss = random.getstate()
    states: dict[str, Any] = {
        "python": (version, torch.tensor(numbers, dtype=torch.int64), gauss),
        "torch": torch.get_rng_state(),
    }
    numpy = _numpy()
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        inner = state["state"]
        states["numpy"] = {
            "bit_generator": str(state["bit_generator"]),
            "key": [int(word) for word in inner["key"]],
            "pos": int(inner["pos"]),
            "has_gauss": int(state["has_gauss"]),
            "gauss": float(state["gauss"]),
        }
    for name in _DEVICES:
        module: Any = getattr(torch, name)
        if module.is_available() and (name == "mps" or module.is_initialized()):
            states[name] = (
                [module.get_rng_state()] if name == "mps" else list(module.get_rng_state_all())
            )
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set the generators of this process to `random_states`, as far as their devices are here."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    torch.set_rng_state(states["torch"].clone())
    numpy, saved = _numpy(), states.get("numpy")
    if numpy is not None and saved is not None:
        key = numpy.array(saved["key"], dtype=numpy.uint32)
        state = {**saved, "state": {"key": key, "pos": saved["pos"]}}
        numpy.random.set_state(state)
    for name in _DEVICES:
        module: Any = getattr(torch, name)
        if name in states and module.is_available():
            for index, state in enumerate(states[name]):
                if name == "mps":
                    module.set_rng_state(state.clone())
                elif index < module.device_count():
                    module.set_rng_state(state.clone(), index)


def _numpy() -> Any:
    """The module, if the process uses it."""
    return sys.modules.get("numpy")


def capture(subjects: Subjects, extra: Any) -> dict[str, Any]:
    """Return the content, whose tensors are mostly the live ones. Synchronises.

    Of what ranks hold parts there are `Shard` and ``DTensor`` values; ``extra`` is put in as it is.
    Masters take over what was written to half weights. Raises `PreampStateError` inside a
    ``scale_loss`` block, and where a gradient was changed while a loss scale was on it or lies
    unreduced inside of ``fully_shard``.
    """
    for engine in subjects.engines:
        check_outside_blocks(engine, "save_checkpoint")
    check_reduced(subjects.models)
    fsdp.reshard(subjects.models)
    shares = MasterShards(subjects)
    names = {id(param): name for name, param in subjects.named_params()}
    masters = subjects.masters()
    return {
        "models": [_model_state(model, shares) for model in subjects.models],
        "optimizers": [
            _optimizer_state(optimizer, names, shares) for optimizer in subjects.optimizers
        ],
        "own_params": {
            name: shares.value_of(masters.get(id(param), param).detach(), id(param))
            for name, param in subjects.named_params()
            if name.startswith("optimizers/")
        },
        "engines": [_engine_state(engine, subjects) for engine in subjects.engines],
        "gradients": subjects.gradients(),
        "schedulers": [
            {"class": class_name(scheduler), "state": scheduler.state_dict()}
            for scheduler in subjects.schedulers
        ],
        "rng": random_states(),
        "extra": extra,
    }


def _model_state(model: nn.Module, shares: MasterShards) -> dict[str, Any]:
    state = shares.model_state(model)
    metadata: Any = getattr(state, "_metadata", {})
    return {
        "class": class_name(model),
        "state": {
            name: value.contiguous() if isinstance(value, torch.Tensor) else value
            for name, value in state.items()
        },
        "metadata": {name: dict(entry) for name, entry in metadata.items()},
    }


def _optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str], shares: MasterShards
) -> dict[str, Any]:
    return {
        "class": class_name(optimizer),
        "state": shares.optimizer_state(optimizer),
        "params": describe_params(optimizer, names),
    }


def describe_params(
    optimizer: torch.optim.Optimizer, names: dict[int, str]
) -> list[dict[str, Any]]:
    """What tells whether a state is of this very optimizer: its parameters, in their order."""
    return [
        {
            "name": names[id(leaf_of(param))],
            "shape": list(leaf_of(param).shape),
            "dtype": dtype_name(param.dtype),
        }
        for param in params_of(optimizer)
    ]


def _engine_state(engine: Engine, subjects: Subjects) -> dict[str, Any]:
    return {
        "opt_level": engine.policy.opt_level,
        "optimizers": [
            index for index, o in enumerate(subjects.optimizers) if id(o) in engine.sessions
        ],
        "scalers": engine.state_dict(),
        "pending": pending_state(engine),
    }
