# SPDX-License-Identifier: BSD-3-Clause
"""What an engine holds: bytes by category."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch.nn.parameter import is_lazy

from preamp.core.away import values_of
from preamp.core.pytree import tensors_in
from preamp.core.tensors import local_of, storage_key, stored_grad
from preamp.core.torch_private.sparse import stored_parts
from preamp.engine.core import EngineCore
from preamp.engine.lookup import engine_of
from preamp.engine.storage import uses_host
from preamp.optim import pair_of

CATEGORIES = ("weights", "buffers", "masters", "gradients", "optimizer state", "loss scaler")
"""Where bytes go that stay from one step to the next."""

ON_HOST = "{} on the host"
"""The name of the part of a category that ``Storage(place="host")`` keeps there."""


class _Seen:
    """Storages counted so far; each counts where it is met first."""

    def __init__(self) -> None:
        self._keys: set[int] = set()

    def bytes_of(self, tensors: Iterable[torch.Tensor]) -> int:
        total = 0
        for tensor in map(local_of, tensors):
            if is_lazy(tensor):
                continue
            if tensor.layout is not torch.strided:  # indices and values
                parts = _parts(tensor)
                total += self.bytes_of(parts) if parts else tensor.numel() * tensor.element_size()
                continue
            storage = tensor.untyped_storage()
            key = storage_key(storage)
            if key not in self._keys:
                self._keys.add(key)
                total += storage.nbytes()
        return total


def count_memory(engine: EngineCore | torch.nn.Module | torch.optim.Optimizer) -> dict[str, int]:
    """Count the bytes that an engine's models and optimizers hold now, by category.

    Storages are counted, each once, in the order of the categories: tied weights do not count
    twice, and a view counts with the whole storage behind it. Nothing is made by looking: a
    master's gradient that was never read is not there. Of sharded tensors this rank's part counts,
    with what ``fully_shard`` pads it with. Does not synchronise.

    Args:
        engine: One, or a model or optimizer that has one. Best between a backward and its step,
            and not before the second step: optimizers make their state in the first one.

    Returns:
        Bytes by the names in `CATEGORIES`. ``"optimizer state"`` has the tensors in the
        optimizers' state and in their groups, ``"loss scaler"`` each scaler's scale, counter and
        overflow flag. With ``Storage(place="host")`` and weights on another device, what lies on
        the host is apart: ``"masters on the host"``, ``"optimizer state on the host"``, and with
        gradients released ``"gradients on the host"``, whose memory stays between steps.

    Raises:
        PreampStateError: What was given has no engine.
    """
    if not isinstance(engine, EngineCore):
        engine = engine_of(engine)
    weights: list[Any] = [param for model in engine.models for param in model.parameters()]
    buffers = [buffer for model in engine.models for buffer in model.buffers()]
    updated = [
        param
        for optimizer in engine.optimizers
        for group in optimizer.param_groups
        for param in group["params"]
    ]
    twins = [twin for twin in map(pair_of, updated) if twin is not None]
    masters = [twin.master for twin in twins]
    # Between a forward and its backward ``fully_shard`` has gathered weights in place of these.
    known = {id(param) for param in (*weights, *masters)}
    weights += (param for param in updated if id(param) not in known)
    held = [grad for p in (*weights, *masters) if (grad := stored_grad(p)) is not None]
    gradients = [*map(values_of, held), *engine.kept_on_host.values()]
    found: dict[str, list[torch.Tensor]] = {
        "weights": weights,
        "buffers": buffers,
        "masters": [twin.kept for twin in twins],
        "gradients": gradients,
        "optimizer state": [t for optimizer in engine.optimizers for t in _state(optimizer)],
        "loss scaler": [
            tensor
            for scaler in engine.scalers
            for tensor in (scaler.scale, scaler.growth_tracker, scaler.found_inf)
        ],
    }
    if uses_host(engine):
        for name in CATEGORIES:
            tensors = found[name]
            found[name] = [tensor for tensor in tensors if not _is_on_host(tensor)]
            found[ON_HOST.format(name)] = [tensor for tensor in tensors if _is_on_host(tensor)]
    seen = _Seen()
    sizes = {name: seen.bytes_of(tensors) for name, tensors in found.items()}
    return {name: size for name, size in sizes.items() if size or name in CATEGORIES}


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    yield from tensors_in(cast("Any", optimizer.state))
    for group in optimizer.param_groups:
        yield from tensors_in({key: value for key, value in group.items() if key != "params"})


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return stored_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # a layout of a library, such as mkldnn's
