# SPDX-License-Identifier: BSD-3-Clause
"""A load that fails half-way puts back all that it has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp


class Scheduler:
    """One that is interrupted while it loads."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["steps"] == 1:
            state["steps"] = 2
            raise KeyboardInterrupt


class Model(nn.Module):
    """With a buffer that cannot be written to, since its elements share memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(1, 4).expand(4, 4), persistent=False)
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x) @ self.mask.to(x.dtype))


def trained(level: str, storage: str) -> tuple[Model, Any]:
    model = Model()
    optimizer = preamp.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    model, optimizer = preamp.initialize(
        model, optimizer, opt_level=level, storage=storage, verbosity=0
    )
    for _ in range(2):
        with preamp.scale_loss(model(torch.randn(8, 4)).square().sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def numbers(model: Model, optimizer: Any) -> list[torch.Tensor]:
    state = [v for e in optimizer.state.values() for v in e.values() if isinstance(v, torch.Tensor)]
    return [t.clone() for t in (*model.state_dict().values(), *model.parameters(), *state)]


@pytest.mark.parametrize(("level", "storage"), [("O0", "full"), ("O2", "full"), ("O5", "split")])
def test_an_interrupted_scheduler_leaves_models_and_optimizers(
    level: str, storage: str, tmp_path: Path
) -> None:
    saved = trained(level, storage)
    preamp.save_checkpoint(tmp_path / "a.pt", *saved, schedulers=Scheduler())
    model, optimizer = trained(level, storage)
    before = numbers(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        preamp.load_checkpoint(tmp_path / "a.pt", model, optimizer, schedulers=Scheduler())
    pairs = zip(numbers(model, optimizer), before, strict=True)
    assert [torch.equal(now, then) for now, then in pairs] == [True] * len(before)
