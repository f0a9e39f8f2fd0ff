# SPDX-License-Identifier: BSD-3-Clause
"""The layers of half models: hooked by ``initialize``, refused where they join a model later."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from preamp.casting import attach_layer_casts, attach_state_hooks
from preamp.casting.state_hooks import SaveFloat32
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import PreampStateError, bad_state
from preamp.core.torch_private.modules import has_hook
from preamp.core.undo import UndoStack
from preamp.engine.copies import attach_copies
from preamp.engine.engine import Engine


def hook_layers(
    engine: Engine, dtype: torch.dtype, layers: Sequence[nn.Module], undo: UndoStack
) -> None:
    """Attach what each module of a model has that is half, until ``undo``."""
    attach_layer_casts(layers, dtype, engine.conversion.kept, undo)
    attach_state_hooks(layers, engine.link, undo)
    if engine.policy.master_weights:
        attach_copies(layers, engine.copies, undo)


def refuse_new_layers(engine: Engine, params: Sequence[torch.Tensor]) -> None:
    """Refuse ``params`` of layers that came into a half model after ``initialize``, or new ones.

    Parameters outside of the models may join, and those that were there.
    """
    dtype, ids = engine.policy.cast_model_type, {*map(id, params)}
    if dtype is None or dtype not in HALF_DTYPES:
        return
    for model in engine.own_models:
        for layer in model.modules():
            is_new = not has_hook(layer, SaveFloat32)
            for param in filter(torch.is_floating_point, layer.parameters(recurse=False)):
                was_there = not is_new and id(param) in engine.conversion.members
                if id(param) in ids and not was_there:
                    raise _joins_late(engine, model, param)


def _joins_late(engine: Engine, model: nn.Module, param: torch.Tensor) -> PreampStateError:
    name = next(name for name, own in model.named_parameters() if own is param)
    return bad_state(
        f"add_param_group was given {name!r}, which {type(model).__name__} did not have at "
        f"initialize (opt_level={engine.policy.opt_level!r})",
        "Layers get half weights, masters and casts from initialize",
        "Call preamp.engine_of(optimizer).close(), which gives float32 weights back and keeps the "
        "optimizer's state, then add_param_group, then preamp.initialize again",
    )
