# SPDX-License-Identifier: BSD-3-Clause
"""Small trainings with a known trouble, and the verdict that the planner is held to on each.

Every case is deterministic and takes about a second to plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from preamp.planning.isolation import LossFn

Made = tuple[nn.Module, LossFn, Any, torch.optim.Optimizer]
_WIDTH = 32
_WITH_MASTERS = frozenset({"O1", "O2", "O4", "O5"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One training and the verdict it should get."""

    name: str
    brief: str  # what it shows
    make: Callable[[], Made]  # makes model, loss function, batch and optimizer
    recommended: str
    fits: frozenset[str] = _WITH_MASTERS  # levels that have to fit
    # Levels that must not, with the kind of problem and a part of the tensor's name.
    fails: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])


def _random(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return std * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _initialized(model: nn.Module) -> nn.Module:
    """Give the matrices normal values that do not depend on the global random state."""
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            if param.dim() > 1:
                param.copy_(_random(*param.shape, seed=index, std=param.size(1) ** -0.5))
    return model


def _mlp(*middle: nn.Module) -> nn.Module:
    layers = (nn.Linear(_WIDTH, _WIDTH), *middle, nn.GELU(), nn.Linear(_WIDTH, _WIDTH))
    return _initialized(nn.Sequential(*layers))


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return _random(64, _WIDTH, seed=100), _random(64, _WIDTH, seed=101)


def _mean_square(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def _adamw(model: nn.Module, lr: float = 1e-3, eps: float = 1e-8) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, eps=eps)


def _stable() -> Made:
    model = _mlp(nn.LayerNorm(_WIDTH))
    return model, _mean_square, _batch(), _adamw(model)


_SMALL = 2.0**-14  # brings the gradients of this model to about 1e-8


def _small_loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return _SMALL * _mean_square(model, batch)


def _tiny_gradients() -> Made:
    model = _mlp(nn.LayerNorm(_WIDTH))
    return model, _small_loss, _batch(), _adamw(model, eps=1e-14)


class _Attention(nn.Module):
    """Attention undivided, with grown weights: logits of 320² = 102400, beyond float16's 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.key = nn.Linear(_WIDTH, _WIDTH, bias=False)
        self.value = nn.Linear(_WIDTH, _WIDTH)
        _initialized(self)
        with torch.no_grad():
            for layer in (self.query, self.key):
                layer.weight.copy_(320 * torch.eye(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.query(x) @ self.key(x).transpose(-2, -1)
        return F.softmax(logits, dim=-1) @ self.value(x)


def _attention_logits() -> Made:
    model = _Attention()
    batch = torch.eye(_WIDTH).expand(4, _WIDTH, _WIDTH), _random(4, _WIDTH, _WIDTH, seed=101)
    return model, _mean_square, batch, _adamw(model)


def _small_steps() -> Made:
    model = _mlp(nn.LayerNorm(_WIDTH))
    return model, _mean_square, _batch(), _adamw(model, lr=1e-6)


def _batch_norm() -> Made:
    model = _initialized(nn.Sequential(nn.BatchNorm1d(_WIDTH), nn.Linear(_WIDTH, _WIDTH)))
    x, y = _batch()
    return model, _mean_square, (1000 * x, y), _adamw(model)


class _Wide(nn.Module):
    """A residual stream with a few very large features, as trained transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, _WIDTH)
        self.norm = nn.LayerNorm(_WIDTH)
        self.down = nn.Linear(_WIDTH, _WIDTH)
        _initialized(self)
        with torch.no_grad():
            self.up.bias[0] = 20000.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(x + self.up(x)))


def _healthy_bfloat16() -> Made:
    model = _Wide()
    return model, _mean_square, _batch(), _adamw(model)


_BF16 = frozenset({"O4", "O5"})
_HALF_WEIGHTS = "O5 without masters"

CASES = {
    case.name: case
    for case in (
        Case(
            name="stable",
            brief="Everything in the middle of float16's range.",
            make=_stable,
            recommended="O5",
        ),
        Case(
            name="tiny-gradients",
            brief="Gradients of about 1e-8, below what float16 can hold without a loss scale.",
            make=_tiny_gradients,
            recommended="O5",
        ),
        Case(
            name="attention-logits",
            brief="Attention logits of 102400: too large for float16, no matter for bfloat16.",
            make=_attention_logits,
            recommended="O5",
            fits=_BF16,
            fails={level: ("overflow", "bmm") for level in ("O1", "O2", "O3")},
        ),
        Case(
            name="small-steps",
            brief="A learning rate of 1e-6, whose steps half weights without masters lose.",
            make=_small_steps,
            recommended="O5",
            fails={level: ("stall", "") for level in ("O3", _HALF_WEIGHTS)},
        ),
        Case(
            name="batch-norm",
            brief="Inputs whose variance of 1e6 a float16 batch norm cannot store.",
            make=_batch_norm,
            recommended="O5",
            fails={"O3": ("overflow", "running_var")},
        ),
        Case(
            name="healthy-bfloat16",
            brief="Features of 20000 in the residual stream: float16 fits with little room.",
            make=_healthy_bfloat16,
            recommended="O5",
        ),
    )
}
"""By name."""
