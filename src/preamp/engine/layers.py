# SPDX-License-Identifier: BSD-3-Clause
"""The layers of half models: hooked by ``initialize``, and those that join a model later."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from preamp.casting import attach_layer_casts, attach_state_hooks
from preamp.casting.state_hooks import SaveFloat32
from preamp.core.dtypes import HALF_DTYPES, is_half
from preamp.core.undo import UndoStack
from preamp.engine import checks
from preamp.engine.copies import attach_copies
from preamp.engine.engine import Engine
from preamp.engine.storage import check_storage
from preamp.engine.weights import attach_move_doors
from preamp.kernels.modules import has_hook


def hook_layers(
    engine: Engine, dtype: torch.dtype, layers: Sequence[nn.Module], undo: UndoStack
) -> None:
    """Attach what each module of a model has that is half, until ``undo``."""
    attach_layer_casts(layers, dtype, engine.conversion.kept, undo)
    attach_state_hooks(layers, engine.link, undo)
    if engine.policy.master_weights:
        attach_copies(layers, engine.copies, undo)
    if engine.policy.storage.masters == "split":
        attach_move_doors(layers, engine.link, undo)


def cast_new_layers(
    engine: Engine, optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]
) -> Mapping[int, torch.Tensor]:
    """Cast and hook what has joined a half model, if ``params`` of ``optimizer`` are part of it.

    That is, all modules that came into the model after ``initialize``, and those of ``params`` that
    were put into earlier modules. Parameters outside of the models stay as they are, as in
    ``initialize``. Returns what ``params`` were before they were cast, now or in an earlier call,
    by ``id``. If it raises, nothing has changed.
    """
    dtype, ids = engine.policy.cast_model_type, {*map(id, params)}
    if dtype is None or dtype not in HALF_DTYPES:
        return {}
    for model in engine.own_models:
        layers = [part for part in model.modules() if not has_hook(part, SaveFloat32)]
        new = {id(t) for layer in layers for t in _own(layer)}
        new |= {id(t) for t in model.parameters() if id(t) in ids and _is_unknown(engine, t)}
        if new & ids:
            _cast(engine, optimizer, model, dtype, layers, new)
    values = {id(param): engine.conversion.awaited_value(param) for param in params}
    return {key: value for key, value in values.items() if value is not None}


def _own(layer: nn.Module) -> list[torch.Tensor]:
    tensors = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _is_unknown(engine: Engine, param: torch.Tensor) -> bool:
    """Whether a parameter is none that was cast, or given a master, before."""
    is_known = id(param) in engine.conversion.dtypes or engine.master_of(param) is not None
    return param.is_floating_point() and not is_half(param) and not is_known


def _cast(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    dtype: torch.dtype,
    layers: Sequence[nn.Module],
    new: set[int],
) -> None:
    policy, undo = engine.policy, UndoStack()
    engine.check_outside_blocks("add_param_group, of layers that were added to the model,")
    planned = checks.planned_conversion([*engine.own_models], policy)
    check_storage([model], [optimizer], policy, planned.kept)
    before = engine.conversion.kept
    try:
        keeps_norms = bool(policy.keep_batchnorm_fp32)
        engine.conversion.kept = planned.kept
        planned.convert(model, dtype, keep_batchnorm_fp32=keeps_norms, only=new)
        hook_layers(engine, dtype, layers, undo)
    except BaseException:
        engine.conversion.kept = before
        undo.unwind()
        planned.revert(planned.originals)
        raise
    engine.undo_of(model).push(undo.unwind)
    engine.conversion.take_in(planned)
    if planned.changed:
        warnings.warn(planned.changed, stacklevel=5)
