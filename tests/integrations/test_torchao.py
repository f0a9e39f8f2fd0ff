# SPDX-License-Identifier: BSD-3-Clause
"""torchao's optimizers with quantized state: they train, and say how they are saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from integrations.small import START, WARNINGS, assert_same_models, needs

torchao = needs("torchao.optim")

pytestmark = WARNINGS
KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")


def started(kind: str, level: str) -> tuple[Any, Any]:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = getattr(torchao, kind)(model.parameters(), lr=1e-2)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, **START)
    return model, optimizer


def train(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses: list[float] = []
    for step in steps:
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        loss = (model(x).float() - x).square().mean()
        losses.append(loss.item())
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_state_is_refused_before_writing_and_resumes_by_torch(
    kind: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its step would be compiled, which takes longer than all of these tests.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    model, optimizer = started(kind, level)
    before = train(model, optimizer, range(5))
    with pytest.raises(TypeError, match=re.escape("preamp.state_dict(optimizer) by torch.save")):
        preamp.save_checkpoint(tmp_path / "file", model, optimizer)
    assert list(tmp_path.iterdir()) == []
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "preamp": preamp.state_dict(optimizer),
    }
    torch.save(parts, tmp_path / "parts")
    after = train(model, optimizer, range(5, 10))
    again, other = started(kind, level)
    saved = torch.load(tmp_path / "parts", weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    preamp.load_state_dict(other, saved["preamp"])
    assert train(again, other, range(5, 10)) == after
    assert_same_models(again, model)
    assert after[-1] < before[0]
