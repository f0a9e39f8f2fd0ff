# SPDX-License-Identifier: BSD-3-Clause
"""A model with one of everything whose memory is easily counted wrong, and training steps of it."""

from typing import Any

import torch
from torch import nn

import preamp

TOKENS = torch.arange(7)


class Mixed(nn.Module):
    """Embedding with a tied head, batch norm, buffers, a frozen and a 0-dim parameter."""

    table: torch.Tensor
    wide: torch.Tensor
    counter: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.plain_norm = nn.BatchNorm1d(4, affine=False)
        self.conv = nn.Conv1d(1, 3, 2)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.gain = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("table", torch.ones(3, 3))
        self.register_buffer("wide", torch.ones(3, dtype=torch.float64))
        self.register_buffer("counter", torch.zeros(2, dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.plain_norm(self.norm(self.linear(self.tokens(tokens)))) * self.gain
        return self.head(x).float().mean() + self.conv(x[:, None]).float().square().mean()


def counted(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    level: str,
    *inputs: torch.Tensor,
    **overrides: Any,
) -> dict[str, int]:
    """What a real engine holds between the second backward and its step."""
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **overrides)
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(1.0)  # no step may be skipped: it makes the state
    for step in range(2):
        with preamp.scale_loss(model(*inputs).float().mean(), optimizer) as scaled:
            scaled.backward()
        if step == 0:
            optimizer.step()
            optimizer.zero_grad()
    found = preamp.count_memory(engine)
    engine.close()
    return found
