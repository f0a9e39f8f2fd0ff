# SPDX-License-Identifier: BSD-3-Clause
"""Cast whole models: weights and buffers to a dtype, batch norms left out if asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from preamp.casting.io import MatchWeightDtype
from preamp.core.undo import Removable
from preamp.kernels.fsdp import renew, reshard
from preamp.kernels.shards import set_data

# Layers whose kernels want inputs and weights of one dtype. Batch norms join them only where they
# are half themselves: float32 ones take half inputs.
_SINGLE_DTYPE_LAYERS = (
    nn.Linear,
    nn.Bilinear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.PReLU,
    nn.MultiheadAttention,
)

# The common base of all batch norms, SyncBatchNorm and user subclasses included, has no public
# name of its own.
_BATCH_NORM: type[nn.Module] = nn.BatchNorm1d.__bases__[0]


def is_affine_batchnorm(module: nn.Module) -> bool:
    """Whether ``module`` is a batch norm with weights of its own, of any kind."""
    return isinstance(module, _BATCH_NORM) and bool(module.affine)


class Conversion:
    """The casts of one engine's models, and how to take them back.

    Attributes:
        originals: Values from before the cast, by ``id(parameter)``.
    """

    def __init__(self) -> None:
        """Start with nothing converted."""
        self.originals: dict[int, torch.Tensor] = {}
        self._original_grads: dict[int, torch.Tensor] = {}
        self._tensors: list[tuple[torch.Tensor, torch.dtype]] = []
        self._models: list[nn.Module] = []

    def convert(self, model: nn.Module, dtype: torch.dtype, *, keep_batchnorm_fp32: bool) -> None:
        """Cast the floating parameters, their gradients, and the floating buffers of ``model``.

        Parameters and buffers keep their identity, so an optimizer built before still owns them.

        Args:
            model: Mutated.
            dtype: Target dtype.
            keep_batchnorm_fp32: Leave batch norms with weights of their own as they are.
        """
        self._models.append(model)
        for module in model.modules():
            if keep_batchnorm_fp32 and is_affine_batchnorm(module):
                continue
            for tensor in _own_floating_tensors(module):
                self._convert_tensor(tensor, dtype)
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()
        renew(model)

    def _convert_tensor(self, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        if tensor.dtype is dtype:
            return
        self.originals.setdefault(id(tensor), tensor.data)
        self._tensors.append((tensor, tensor.dtype))
        grad, tensor.grad = tensor.grad, None
        set_data(tensor, tensor.data.to(dtype))
        if grad is not None:
            self._original_grads[id(tensor)] = grad
            tensor.grad = grad.to(dtype)

    def dtypes(self) -> dict[int, torch.dtype]:
        """The dtypes from before the cast, by ``id`` of what was cast."""
        return {id(tensor): dtype for tensor, dtype in self._tensors}

    def forget_originals(self) -> None:
        """Let go of the values from before the cast, once the masters have taken theirs."""
        self.originals.clear()
        self._original_grads.clear()

    def revert(self, values: Mapping[int, torch.Tensor]) -> None:
        """Give every tensor its former dtype back.

        Args:
            values: Exact values to restore, by ``id(tensor)``: masters, or the originals. A
                tensor that has none keeps its value, cast back.
        """
        reshard(self._models)
        for tensor, dtype in reversed(self._tensors):
            grad, tensor.grad = tensor.grad, None
            set_data(tensor, values.get(id(tensor), tensor.data).to(dtype))
            if grad is not None:
                original = self._original_grads.get(id(tensor))
                tensor.grad = grad.to(dtype) if original is None else original
        self._tensors.clear()
        for model in self._models:
            renew(model)
        self._models.clear()


def _own_floating_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            yield tensor


def attach_layer_casts(model: nn.Module, dtype: torch.dtype) -> list[Removable]:
    """Let single layers of a half model accept inputs of another floating dtype.

    Args:
        model: Mutated: its ``torch.nn`` layers with tensors of ``dtype`` get a pre-hook.
        dtype: The half dtype the model was cast to.
    """
    return [
        module.register_forward_pre_hook(MatchWeightDtype(), with_kwargs=True)
        for module in model.modules()
        if isinstance(module, (*_SINGLE_DTYPE_LAYERS, _BATCH_NORM))
        and any(tensor.dtype is dtype for tensor in (*module.parameters(), *module.buffers()))
    ]
