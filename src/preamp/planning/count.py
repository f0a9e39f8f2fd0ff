# SPDX-License-Identifier: BSD-3-Clause
"""Bytes that a real engine holds, counted from its tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch

from preamp.core.tensors import stored_grad
from preamp.engine import Engine
from preamp.planning.layout import storage_key
from preamp.planning.states import tensors_in

CATEGORIES = ("weights", "buffers", "masters", "gradients", "optimizer state", "loss scaler")
"""Where bytes go that stay from one step to the next."""


class _Seen:
    """Storages counted so far; each counts where it is met first."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in tensors:
            if tensor.layout is not torch.strided:  # sparse gradients: indices and values
                total += self.bytes_of(_parts(tensor.coalesce()))
                continue
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key not in self._keys:
                self._keys.add(key)
                total += storage.nbytes()
        return total


def count_memory(engine: Engine) -> dict[str, int]:
    """Do what `preamp.count_memory` says."""
    weights = [param for model in engine.models for param in model.parameters()]
    buffers = [buffer for model in engine.models for buffer in model.buffers()]
    updated = [
        param
        for optimizer in engine.optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    known = {id(param) for param in weights}
    masters = [param for param in updated if id(param) not in known]
    gradients = [grad for p in (*weights, *masters) if (grad := stored_grad(p)) is not None]
    seen = _Seen()
    return {
        "weights": seen.bytes_of(weights),
        "buffers": seen.bytes_of(buffers),
        "masters": seen.bytes_of(masters),
        "gradients": seen.bytes_of(gradients),
        "optimizer state": seen.bytes_of(
            tensor for optimizer in engine.optimizers for tensor in _state(optimizer)
        ),
        "loss scaler": seen.bytes_of(
            tensor
            for scaler in engine.scalers
            for tensor in (scaler.scale, scaler.growth_tracker, scaler.found_inf)
        ),
    }


def _state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    yield from tensors_in(cast("Any", optimizer.state))
    for group in optimizer.param_groups:
        yield from tensors_in({key: value for key, value in group.items() if key != "params"})


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor.indices(), tensor.values()
