# SPDX-License-Identifier: BSD-3-Clause
"""Measurements of live objects: number formats, bytes, bits per byte, seconds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import preamp
from preamp.core.tensors import local_of, storage_key
from preamp.demo.data import Batch
from preamp.demo.model import GPT
from preamp.demo.records import Dtypes, Memory

_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """The mean cross-entropy of the next byte, a scalar in nats; all on the model's device."""
    logits: Tensor = model(batch.inputs)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())


def held_out_bits(model: GPT, batches: Iterable[Batch]) -> float:
    """Mean bits per held-out byte, as trained; 8.0 knows nothing. Leaves it in evaluation mode."""
    model.eval()
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            total += loss_of(model, batch).item() * batch.targets.numel()
            count += batch.targets.numel()
    return total / count / math.log(2)


def memory_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Memory:
    """What `preamp.count_memory` counts on this rank, per parameter of the whole model."""
    held = preamp.count_memory(preamp.engine_of(optimizer))
    count = sum(p.numel() for p in model.parameters())
    names = ("weights", "masters", "gradients", "optimizer state")
    both = {n.replace(" ", "_"): held[n] + held.get(f"{n} on the host", 0) for n in names}
    return Memory(**{name: size / count for name, size in both.items()})


def dtypes_of(model: GPT, optimizer: torch.optim.Optimizer, batch: Batch) -> Dtypes:
    """Short formats of parameters and of a forward: ``"bf16+fp32"``, the more frequent first."""
    seen: list[Tensor] = []

    def note(_module: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor) -> None:
        seen.append(output)

    # Before the forward, after which ``fully_shard`` may leave weights gathered.
    weights, masters = _formats(model.parameters()), _formats(_masters(model, optimizer))
    with ExitStack() as hooks, torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                hooks.enter_context(module.register_forward_hook(note))
        model(batch.inputs)
    return Dtypes(weights=weights, compute=_formats(seen), masters=masters or "none")


def activation_bytes(model: GPT, batch: Batch) -> int:
    """Bytes of storages a forward keeps for its backward, parameters and inputs left out."""
    known = {storage_key(t.untyped_storage()) for t in (batch.inputs, batch.targets)}
    kept: dict[int, int] = {}

    def note(module: nn.Module, _inputs: tuple[Tensor, ...]) -> None:
        # Not earlier: where parameters are sharded, they are gathered for the forward.
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        known.update(storage_key(local_of(t).untyped_storage()) for t in own)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage_key(storage)] = storage.nbytes()
        return tensor

    with ExitStack() as hooks:
        for module in model.modules():
            hooks.enter_context(module.register_forward_pre_hook(note))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, batch)
    # The graph holds the storages until here, so no key was used twice.
    del loss
    return sum(size for key, size in kept.items() if key not in known)


def _masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    weights = {id(p) for p in model.parameters()}
    return [p for p in preamp.master_params(optimizer) if id(p) not in weights]


def _formats(tensors: Iterable[Tensor]) -> str:
    elements: Counter[str] = Counter()
    for tensor in tensors:
        elements[_SHORT.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))] += (
            tensor.numel()
        )
    return "+".join(name for name, _ in elements.most_common())
