# SPDX-License-Identifier: BSD-3-Clause
"""Small models whose gradients are known exactly, in half precision too.

Their outputs are linear in each parameter alone and every input is a small multiple of a power of
two, so no gradient is ever rounded: whatever the level, it equals the one plain torch computes
in float32, and an update that differs by one bit is an error of ours.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

GRAIN = 2.0**-10
"""Loss coefficients are small multiples of this: times 65536 they still fit float16."""


class Exact(nn.Module):
    """A linear layer, and a batch norm whose parameters are added to the result.

    The batch norm's parameters stay float32 at O2 and O5, so half and float32 gradients meet in
    one backward.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, x: torch.Tensor, parts: str = "ab") -> torch.Tensor:
        return self.linear(x) + self.norm.weight - 2 * self.norm.bias  # all of it, as in `Parts`


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and loss coefficients of backward number ``index``; both exact in float16."""
    generator = torch.Generator().manual_seed(1000 + index)
    x = torch.randint(-2, 3, (2, 3), generator=generator).float()
    coefficients = torch.randint(1, 8, (2, 2), generator=generator).float() * GRAIN
    return x, coefficients


def loss_of(models: Iterable[nn.Module], index: int) -> torch.Tensor:
    """A float32 loss whose gradients do not depend on the parameters."""
    x, coefficients = batch(index)
    # Casting the input is for plain models; after initialize the model does it itself.
    outputs = [model(x.to(next(model.parameters()).dtype)).float() for model in models]
    return sum((output * coefficients).sum() for output in outputs)  # type: ignore[return-value]


class Damage:
    """Makes the gradient of one parameter infinite or nan, when told to."""

    def __init__(self, param: torch.Tensor, value: float) -> None:
        """Hook ``param``; nothing happens until `armed` is set."""
        self.armed = False
        self._value = value
        param.register_hook(self._spoil)

    def _spoil(self, grad: torch.Tensor) -> torch.Tensor:
        if not self.armed:
            return grad
        self.armed = False
        spoilt = grad.clone()
        spoilt.view(-1)[-1] = self._value
        return spoilt


def values(thing: Any) -> list[torch.Tensor]:
    """Copies of all tensors of a module, or of all parameters of an optimizer."""
    if isinstance(thing, nn.Module):
        return [param.detach().clone() for param in thing.parameters()]
    return [p.detach().clone() for group in thing.param_groups for p in group["params"]]


class Parts(nn.Module):
    """Two linear layers that can be used one at a time; as exact as `Exact`."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, x: torch.Tensor, parts: str = "ab") -> torch.Tensor:
        return sum(self.get_submodule(part)(x) for part in parts)  # type: ignore[return-value]
