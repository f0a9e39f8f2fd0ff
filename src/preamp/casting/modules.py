# SPDX-License-Identifier: BSD-3-Clause
"""Cast whole models: weights and buffers to a dtype, batch norms left out if asked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from preamp.casting.io import CastInputs, MatchWeightDtype
from preamp.casting.kept import Kept, floating_tensors, is_affine_batchnorm, is_single_layer
from preamp.core.dtypes import HALF_DTYPES
from preamp.core.torch_private.fsdp import renew, reshard
from preamp.core.torch_private.modules import add_hook
from preamp.core.torch_private.shards import set_data
from preamp.core.undo import UndoStack


class Conversion:
    """The casts of one engine's models, and how to take them back."""

    def __init__(self, kept: Kept | None = None, changed: str = "") -> None:
        self.kept = kept or Kept()  # what a cast to half leaves in float32
        # what to warn of: buffers that the cast changes by more than its rounding
        self.changed = changed
        # values from before the cast, by ``id(parameter)``
        self.originals: dict[int, torch.Tensor] = {}
        self._grads: dict[int, torch.Tensor] = {}  # gradients that are cast with them, likewise
        self._tensors: list[tuple[torch.Tensor, torch.dtype]] = []
        self.dtypes: dict[int, torch.dtype] = {}  # those from before, by ``id`` of what was cast
        self._models: list[nn.Module] = []
        self.members: dict[int, torch.Tensor] = {}  # what the models had, cast or not, by ``id``

    def convert(self, model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool) -> None:
        """Cast the floating parameters, their gradients, and the floating buffers of ``model``.

        Parameters and buffers keep their identity, so an optimizer built before still owns them.
        Where ``dtype`` is half, what is kept becomes or stays float32.
        """
        self._models.append(model)
        is_half = dtype in HALF_DTYPES
        for tensor in floating_tensors(model):
            self.members[id(tensor)] = tensor
            if is_half and self.kept.is_wide(tensor):
                self._convert_tensor(tensor, torch.float32)
            elif not (keep_batchnorm_fp32 and id(tensor) in self.kept.norms):
                self._convert_tensor(tensor, dtype)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        renew(model)

    def _convert_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype is dtype:
            return
        self.originals.setdefault(id(tensor), tensor.data)
        self._tensors.append((tensor, tensor.dtype))
        self.dtypes.setdefault(id(tensor), tensor.dtype)
        self._cast(tensor, tensor.data, dtype)

    def _cast(self, tensor: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> None:
        """Set ``value`` and cast the gradient, which is kept here in case this is interrupted."""
        if tensor.grad is not None:
            self._grads.setdefault(id(tensor), tensor.grad)
        grad = self._grads.get(id(tensor))
        tensor.grad = None
        set_data(tensor, value.to(dtype))
        tensor.grad = None if grad is None else grad.to(dtype)

    def forget_originals(self) -> None:
        """Let go of the values from before the cast, once the masters have taken theirs."""
        self.originals.clear()
        self._grads.clear()

    def revert(self, values: Mapping[int, torch.Tensor]) -> None:
        """Give every tensor its former dtype, with exact ``values``, if any, by ``id(tensor)``.

        May be called again if it was interrupted.
        """
        reshard(self._models)
        for tensor, dtype in reversed(self._tensors):
            self._cast(tensor, values.get(id(tensor), tensor.data), dtype)
        self._tensors.clear()
        self.dtypes.clear()
        self.members.clear()
        self._grads.clear()
        for model in self._models:
            renew(model)
        self._models.clear()


def attach_layer_casts(
    layers: Iterable[nn.Module], dtype: torch.dtype, kept: Kept, undo: UndoStack
) -> None:
    """Let layers of a model cast to ``dtype``, kept ones included, accept other floating inputs."""
    for module in layers:
        tensors = [*floating_tensors(module)]
        follows = is_single_layer(module) and (
            any(tensor.dtype is dtype for tensor in tensors)
            or (
                any(id(tensor) in kept.named for tensor in tensors)
                and not is_affine_batchnorm(module)  # which takes half inputs as they are
            )
        )
        if follows:
            hook = MatchWeightDtype()
        elif id(module) in kept.modules and not is_affine_batchnorm(module):
            hook = CastInputs(torch.float32)
        else:
            continue
        add_hook(module, "register_forward_pre_hook", hook, undo, with_kwargs=True)
