# SPDX-License-Identifier: BSD-3-Clause
"""Bytes of an optimizer's state, found by one step on small stand-ins.

A stand-in has a small prime in place of every size above one, each prime its own, so a state
tensor's shape says which sizes of the parameter it follows: all of them, as Adam's averages do,
some, as Adafactor's rows, or none, as a step counter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.errors import bad_value
from preamp.core.pytree import tensors_in
from preamp.optim.fused.base import FusedOptimizer
from preamp.planning.optimizers import Make

_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)
Shape = tuple[int, ...]
Part = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Updated:
    """A tensor that an optimizer updates.

    Attributes:
        shape: Its sizes.
        dtype: float32 for a master.
        has_gradient: Whether it takes part in the step.
        group: Index of its parameter group.
    """

    shape: Shape
    dtype: torch.dtype
    has_gradient: bool = True
    group: int = 0


@dataclass(frozen=True, slots=True)
class StateBytes:
    """What an optimizer keeps.

    Attributes:
        bytes: Of all tensors in its state and its groups, for one rank.
        reads_master_gradients: Whether it reads gradients of masters and thereby has them made.
    """

    bytes: int
    reads_master_gradients: bool


def state_bytes(
    make: Make,
    tensors: Sequence[Updated],
    options: Sequence[Mapping[str, Any]] = ({},),
    part: Part = lambda elements: elements,
) -> StateBytes:
    """Count the state that an optimizer has after its first step over ``tensors``.

    ``options`` are of each group; ``part`` tells how many elements of a tensor one rank holds, and
    is applied to state of the parameter's size. Raises `ValueError` if the optimizer has no state
    per parameter, refuses such tensors, or has state whose size follows from something else than
    the parameter's shape.
    """
    small = {tensor: _small_parameter(tensor) for tensor in dict.fromkeys(tensors)}
    optimizer = _stepped(make, small, options)
    kept: dict[Updated, list[tuple[Shape, int]]] = {
        tensor: [(tuple(item.shape), item.element_size()) for item in tensors_in(state)]
        for tensor, param in small.items()
        for state in [cast("dict[Any, Any]", optimizer.state).get(param, {})]
    }
    total = sum(
        _bytes_of(tensor, shape, size, part) for tensor in tensors for shape, size in kept[tensor]
    )
    for group in optimizer.param_groups:
        others = {key: value for key, value in group.items() if key != "params"}
        total += sum(item.numel() * item.element_size() for item in tensors_in(others))
    return StateBytes(total, not isinstance(optimizer, FusedOptimizer))


def _small_shape(shape: Shape) -> Shape:
    if len(shape) > len(_PRIMES):
        raise bad_value(
            f"A parameter of {len(shape)} dimensions",
            f"Up to {len(_PRIMES)} can be estimated",
            "Reshape it, or count a real engine with preamp.count_memory",
        )
    return tuple(p if size > 1 else size for size, p in zip(shape, _PRIMES, strict=False))


def _small_parameter(tensor: Updated) -> torch.nn.Parameter:
    value = torch.ones(_small_shape(tensor.shape), dtype=tensor.dtype, device="cpu")
    is_trained = tensor.has_gradient
    return torch.nn.Parameter(value, requires_grad=is_trained)


def _stepped(
    make: Make,
    small: Mapping[Updated, torch.nn.Parameter],
    options: Sequence[Mapping[str, Any]],
) -> torch.optim.Optimizer:
    groups: list[dict[str, Any]] = [
        {"params": [p for t, p in small.items() if t.group == index], **own}
        for index, own in enumerate(options)
    ]
    try:
        optimizer = make(groups)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS keeps a history of the whole model, of a length that grows")
        is_sparse = isinstance(optimizer, torch.optim.SparseAdam)
        for group in optimizer.param_groups:
            if isinstance(group.get("lr"), (int, float)):
                # No size depends on it, and float16 may not hold it.
                group["lr"] = min(group["lr"], 1.0)
        for tensor, param in small.items():
            if tensor.has_gradient:
                grad = torch.full_like(param, 0.5)
                param.grad = grad.to_sparse() if is_sparse and grad.dim() else grad
        cast("Any", optimizer).step()
    except Exception as error:  # whatever an optimizer of anyone's raises
        empty = [t.shape for t in small if not math.prod(t.shape)]
        is_division = isinstance(error, ArithmeticError) and empty
        hint = f", with a parameter of shape {empty[0]}" if is_division else ""
        raise bad_value(
            f"The optimizer's state cannot be told: {type(error).__name__}: {error}{hint}",
            "Estimated are optimizers that keep state for each parameter, made from these "
            "parameters alone",
            "Pass another optimizer, or the model in place of a number of parameters",
        ) from error
    return optimizer


def _bytes_of(tensor: Updated, shape: Shape, item_bytes: int, part: Part) -> int:
    small = _small_shape(tensor.shape)
    if shape == small and math.prod(shape) > 1:
        return part(math.prod(tensor.shape)) * item_bytes
    if len(shape) > len(small):
        raise _unknown_shape(shape, small)
    elements = 1
    for position, size in enumerate(shape):
        if size > 1 and size != small[position]:
            raise _unknown_shape(shape, small)
        elements *= tensor.shape[position] if size == small[position] else size
    return elements * item_bytes


def _unknown_shape(shape: Shape, small: Shape) -> ValueError:
    return bad_value(
        f"The optimizer keeps a state of shape {shape} for a parameter of shape {small}",
        "Estimated is state whose sizes are those of the parameter, or one",
        "Count a real engine with preamp.count_memory",
    )
