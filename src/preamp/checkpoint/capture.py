# SPDX-License-Identifier: BSD-3-Clause
"""The content of a checkpoint: everything that training goes on from, as plain data."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from preamp.checkpoint.random_states import random_states
from preamp.checkpoint.ranks import rank, world_size
from preamp.checkpoint.staging import SplitTensor, value_of
from preamp.checkpoint.subjects import Subjects, class_name, model_state, params_of
from preamp.core.dtypes import dtype_name
from preamp.engine import Engine
from preamp.engine.resume import engine_state
from preamp.optim import leaf_of
from preamp.policy.storage import FULL, Storage


def capture(subjects: Subjects, extra: Any) -> dict[str, Any]:
    """Return the content, whose tensors are mostly the live ones. Synchronises.

    ``extra`` is put in as it is. Masters take over what was written to half weights. Raises
    `PreampStateError` within a step, and where a rank has parts of tensors.
    """
    subjects.check_whole("save_checkpoint")
    for engine in subjects.engines:
        engine.check_between_steps("save_checkpoint")
    names = {id(param): name for name, param in subjects.named_params()}
    masters = subjects.masters()
    storages = {
        id(o): engine.policy.storage for engine in subjects.engines for o in engine.optimizers
    }
    return {
        "models": [_model_state(model) for model in subjects.models],
        "optimizers": [
            _optimizer_state(optimizer, names, storages.get(id(optimizer)))
            for optimizer in subjects.optimizers
        ],
        "own_params": {
            name: value_of(masters.get(id(param), param))
            for name, param in subjects.named_params()
            if name.startswith("optimizers/")
        },
        "engines": [_engine_state(engine, subjects) for engine in subjects.engines],
        "schedulers": [
            {"class": class_name(scheduler), "state": scheduler.state_dict()}
            for scheduler in subjects.schedulers
        ],
        "ranks": (rank(), world_size()),  # whose random states they are
        "rng": random_states(),
        "extra": extra,
    }


def _model_state(model: nn.Module) -> dict[str, Any]:
    state = model_state(model)
    metadata: Any = getattr(state, "_metadata", {})
    return {
        "class": class_name(model),
        "state": {
            name: value.contiguous() if isinstance(value, (torch.Tensor, SplitTensor)) else value
            for name, value in state.items()
        },
        "metadata": {name: dict(entry) for name, entry in metadata.items()},
    }


def _optimizer_state(
    optimizer: torch.optim.Optimizer, names: dict[int, str], storage: Storage | None
) -> dict[str, Any]:
    return {
        "class": class_name(optimizer),
        "state": optimizer.state_dict(),
        "params": describe_params(optimizer, names),
        # That gradients are released changes nothing of what is kept
        "storage": {key: getattr(storage or FULL, key) for key in ("masters", "moments", "seed")},
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
        **engine_state(engine),
    }
