# SPDX-License-Identifier: BSD-3-Clause
"""What TorchScript compiles in place of a layer: it knows neither dataclasses nor autograd's."""

# TorchScript reads the annotations of forward as types: no __future__ here.
import torch
from torch import nn
from torch.nn import functional as F

from preamp.compat.normalization.functions import Norm


class ScriptedNorm(nn.Module):
    """The layer's numbers in float32 (or float64), rounded once; never ``memory_efficient``."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, norm: Norm, weight: nn.Parameter | None, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.shape = list(norm.shape)
        self.eps = norm.eps
        self.is_centred = norm.is_centred
        self.is_mixed = norm.is_mixed
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input``."""
        weight = self.weight
        out_dtype, wide = input.dtype, torch.float32
        if input.dtype == torch.float64:
            wide = torch.float64
        if weight is not None:
            if self.is_mixed:
                out_dtype = weight.dtype
            if weight.dtype == torch.float64:
                wide = torch.float64
            weight = weight.to(wide)
        if self.is_centred:
            bias = self.bias
            if bias is not None:
                bias = bias.to(wide)
            out = F.layer_norm(input.to(wide), self.shape, weight, bias, self.eps)
        else:
            out = torch.rms_norm(input.to(wide), self.shape, weight, self.eps)
        return out.to(out_dtype)
