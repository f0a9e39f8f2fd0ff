# SPDX-License-Identifier: BSD-3-Clause
"""A model as the list of its tensors: what an opt level makes of each follows from this alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from preamp.casting import find_kept
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.errors import bad_type, bad_value
from preamp.core.tensors import storage_key
from preamp.kernels.stored import BLOCK
from preamp.policy import KeepFP32, Policy

Factory = Callable[[], nn.Module]
_MOST_PARAMETERS = 10**18  # below what an index of torch can tell apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One parameter or buffer; tied ones are one slot."""

    key: int  # ``id`` of the tensor, or another number that is the tensor's own
    name: str  # qualified name, the first of several
    shape: tuple[int, ...]  # its sizes
    dtype: torch.dtype = torch.float32  # before `initialize`
    storage: int  # key of its storage; slots that are views of one storage share it
    storage_bytes: int  # size of the whole storage
    is_parameter: bool = True  # otherwise it is a buffer
    is_trainable: bool = True  # whether it requires a gradient
    is_norm: bool = False  # whether affine batch norms alone own it
    is_kept: bool = False  # whether it stays float32 where the model is cast to half

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    def dtype_at(self, policy: Policy) -> torch.dtype:
        """The dtype that `initialize` gives it."""
        target = policy.cast_model_type
        if target is None or not self.dtype.is_floating_point:
            return self.dtype
        if self.is_kept and target in HALF_DTYPES:
            return torch.float32
        return self.dtype if policy.keep_batchnorm_fp32 and self.is_norm else target

    def has_master_at(self, policy: Policy) -> bool:
        """Whether an optimizer that has it updates a float32 master instead."""
        is_half = self.is_parameter and self.dtype_at(policy) in HALF_DTYPES
        return policy.master_weights and is_half and self.is_trainable


def slots_of(model: object, keep: KeepFP32 | None = None, *, in_rows: bool = False) -> list[Slot]:
    """Describe a model without allocating its tensors.

    The model is a module on any device, ``"meta"`` included; a function without arguments that
    makes one, called with ``torch.device("meta")``; or a number of parameters, which become one
    float32 tensor, or ``in_rows`` one of rows and one of what is left. Returns parameters, then
    buffers, each tensor once.
    """
    if isinstance(model, (int, float)) and not isinstance(model, bool):
        return _flat_slots(model, BLOCK if in_rows else 0)
    module = made(model)
    slots = list(_slots_in(module, KeepFP32() if keep is None else keep))
    for slot in slots:
        if slot.is_parameter and slot.dtype in HALF_DTYPES:
            raise bad_value(
                f"The parameter {slot.name!r} is {slot.dtype} already",
                "The model is given as it is before initialize, in float32",
                "Pass model.float(), or a factory that makes the model in float32",
            )
    return slots


def made(model: object) -> nn.Module:
    """Return the module itself, or the one that a factory makes on the meta device."""
    if isinstance(model, nn.Module):
        return model
    if callable(model):
        try:
            with torch.device("meta"):
                found = model()
        except Exception as error:
            raise bad_value(
                f"The model cannot be made on the meta device: {error}",
                "The factory takes no arguments, and its constructor does not look at values",
                "Bind its arguments by functools.partial, or pass the module itself",
            ) from error
        if isinstance(found, nn.Module):
            return found
        model = found
    raise bad_type(
        f"Got {type(model).__name__} in place of a model",
        "A model is an nn.Module, a function without arguments that returns one, or, for "
        "estimate, a number of parameters",
        "Pass the module itself, or functools.partial(Model, ...) for one that is too large",
    )


def _flat_slots(count: float, row: int) -> list[Slot]:
    if not (1 <= count <= _MOST_PARAMETERS and count == int(count)):
        raise bad_value(
            f"{repr(count).removesuffix('.0')} is not a number of parameters",
            f"It is a whole number from 1 to {_MOST_PARAMETERS:.0e}",
            "Pass for example 7e9",
        )
    elements = int(count)
    shapes: list[tuple[int, ...]] = [(elements,)]
    if row:
        shapes = [(elements // row, row), (elements % row,)]
    return [
        Slot(key=key, name="", shape=shape, storage=key, storage_bytes=4 * math.prod(shape))
        for key, shape in enumerate(shapes)
        if math.prod(shape)
    ]


def _slots_in(model: nn.Module, keep: KeepFP32) -> Iterator[Slot]:
    kept = find_kept([model], keep)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        key, storage = id(tensor), tensor.untyped_storage()
        yield Slot(
            key=key,
            name=name,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            storage=storage_key(storage),
            storage_bytes=storage.nbytes(),
            is_parameter=isinstance(tensor, nn.Parameter),
            is_trainable=tensor.requires_grad,
            is_norm=key in kept.norms,
            is_kept=kept.is_wide(tensor),
        )
