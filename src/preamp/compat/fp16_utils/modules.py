# SPDX-License-Identifier: BSD-3-Clause
"""Casts of whole models under Apex's names; batch norms with weights stay float32."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from preamp.casting import Conversion
from preamp.casting.kept import Kept, find_norms, is_affine_batchnorm
from preamp.core.pytree import cast_floating

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class tofp16(nn.Module):
    """A module that casts its input to float16, for use in ``nn.Sequential``."""

    def forward(self, input: Any) -> Any:
        """Return ``input`` with every floating tensor in it cast; Apex made integers half too."""
        return cast_floating(input, torch.float16)


def BN_convert_float(module: ModuleT) -> ModuleT:
    """Cast every batch norm with weights of its own in ``module`` to float32, and return that.

    A batch norm that is half already has lost its precision.
    """
    for part in module.modules():
        if is_affine_batchnorm(part):
            part.float()
    return module


def network_to_half(network: nn.Module) -> nn.Sequential:
    """Put a cast to float16 before ``network`` and make it half, batch norms float32.

    Batch norms never pass through half, so their statistics and weights keep every bit; Apex
    rounded them. Mutates ``network``.

    Returns:
        ``nn.Sequential(tofp16(), network)``, the structure that state dict keys of old files
        (``"1.…"``) come from.
    """
    return nn.Sequential(tofp16(), BN_convert_float(convert_network(network, torch.float16)))


def convert_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the floating parameters, gradients and buffers of one module, without its children.

    Args:
        module: Mutated; its parameters and buffers keep their identity.
        dtype: Target dtype.
    """
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        if tensor.is_floating_point():
            # torch checks a gradient's dtype against its parameter's, so it steps aside.
            grad, tensor.grad = tensor.grad, None
            tensor.data = tensor.data.to(dtype)
            tensor.grad = None if grad is None else grad.to(dtype)


def convert_network(network: ModuleT, dtype: torch.dtype) -> ModuleT:
    """Cast a model, leaving batch norms with weights of their own as they are.

    Recurrent layers get their weights flattened again.

    Args:
        network: Mutated; parameters and buffers keep their identity, so an optimizer built
            before still owns them.
        dtype: Target dtype.

    Returns:
        ``network``.
    """
    kept = Kept(norms=find_norms([network]))
    Conversion(kept).convert(network, dtype, keep_batchnorm_fp32=True)
    return network


class FP16Model(nn.Module):
    """A model cast to float16, and its inputs with it; outputs stay half.

    Attributes:
        network: The model, converted by `convert_network`.
    """

    def __init__(self, network: nn.Module) -> None:
        """Convert ``network``, in place."""
        super().__init__()
        self.network = convert_network(network, torch.float16)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Call the model on the inputs, every floating tensor in them cast to float16.

        Integer tensors such as token ids or class labels stay what they are; Apex halved them.

        Args:
            *inputs: Tensors, containers of tensors, or anything else.
            **options: The same by name.

        Returns:
            What the model returns.
        """
        return self.network(
            *cast_floating(inputs, torch.float16), **cast_floating(options, torch.float16)
        )
