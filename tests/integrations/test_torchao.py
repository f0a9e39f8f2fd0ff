# SPDX-License-Identifier: BSD-3-Clause
"""torchao: optimizers with quantized state, and linear layers in fp8."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from integrations.contract import START, WARNINGS, assert_same_models, needs
from kit.refusals import refused

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
    with refused("integrations", "quantized state in a checkpoint", model):
        preamp.save_checkpoint(tmp_path / "file", model, optimizer)
    assert list(tmp_path.iterdir()) == []
    parts = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "preamp": preamp.engine_of(optimizer).state_dict(),
    }
    torch.save(parts, tmp_path / "parts")
    after = train(model, optimizer, range(5, 10))
    again, other = started(kind, level)
    saved = torch.load(tmp_path / "parts", weights_only=True)
    again.load_state_dict(saved["model"])
    other.load_state_dict(saved["optimizer"])
    preamp.engine_of(other).load_state_dict(saved["preamp"])
    assert train(again, other, range(5, 10)) == after
    assert_same_models(again, model)
    assert after[-1] < before[0]


RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def layers() -> nn.Sequential:
    sizes = ((64, 128), (128, 128), (128, 64))
    return nn.Sequential(*[part for size in sizes for part in (nn.Linear(*size), nn.ReLU())][:-1])


def in_float8(recipe: str) -> nn.Sequential:
    """A model whose middle layer computes in fp8, emulated; converted before any engine."""
    float8 = needs("torchao.float8")
    torch.manual_seed(5)
    model = layers()
    config = replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    float8.convert_to_float8_training(
        model, config=config, module_filter_fn=lambda module, name: name == "2"
    )
    return model


def started_in_float8(recipe: str, level: str, storage: str) -> tuple[Any, Any]:
    model = in_float8(recipe)
    optimizer = preamp.optimizers.FusedAdam(model.parameters(), lr=1e-2)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, storage=storage, **START)
    return model, optimizer


@pytest.mark.parametrize("storage", ["full", "split", "compact"])
@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_layers_keep_masters_and_resume_to_the_bit(
    recipe: str, level: str, storage: str, tmp_path: Path
) -> None:
    model, optimizer = started_in_float8(recipe, level, storage)
    assert set(model.state_dict()) == {f"{n}.{k}" for n in (0, 2, 4) for k in ("weight", "bias")}
    before = train(model, optimizer, range(5))
    preamp.save_checkpoint(tmp_path / "file", model, optimizer)
    after = train(model, optimizer, range(5))
    again, other = started_in_float8(recipe, level, storage)
    preamp.load_checkpoint(tmp_path / "file", again, other)
    assert train(again, other, range(5)) == after
    assert_same_models(again, model)
    assert sum(after) < sum(before)
    plain = layers()
    plain.load_state_dict(model.state_dict())
    if storage == "full":
        assert all(map(torch.equal, plain.parameters(), preamp.master_params(optimizer)))


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_float8_layers_train_where_weights_are_float32(
    recipe: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on CPUs without units for float16, where products run in float32."""
    monkeypatch.setattr("preamp.casting.functions.cpu_lacks_matmul", lambda _: True)
    model, optimizer = started_in_float8(recipe, level, "full")
    before, after = (sum(train(model, optimizer, range(5))) for _ in range(2))
    assert after < before
