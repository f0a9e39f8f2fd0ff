# SPDX-License-Identifier: BSD-3-Clause
"""Programs that torch makes of a model: exported, traced, scripted, before or with its engine.

What is made with the engine computes what the model computes, anywhere and after `close`; what is
made of a deep copy is float32. torch's own autocast is what casts are recorded as, so all of it is
tried once where half products run as torch has them, and once where they run wide.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import preamp
from cases.levels import BY_KIND, BY_NAME, CASTING_FUNCTIONS
from cases.tolerances import assert_same
from kit.loops import scaled_backward
from kit.refusals import refused

levels = pytest.mark.parametrize("level", BY_KIND)
casting = pytest.mark.parametrize("level", ["O1", pytest.param("O4", marks=pytest.mark.full)])


class Block(nn.Module):
    """Functions of each list, on values of each dtype, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.conv = nn.Conv1d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(F.gelu(self.linear(self.norm(x))))
        h = torch.softmax(h @ h.transpose(1, 2), -1) @ h
        h = self.conv(h.transpose(1, 2)).exp() + 1
        return F.log_softmax(h.pow(2).sum(-1), -1)


X = torch.linspace(-2, 2, 48).view(1, 6, 8)


@pytest.fixture(params=["wide", "native"])
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How half products run on this CPU."""
    if request.param == "native":
        monkeypatch.setattr(
            sys.modules["preamp.engine.initialize"], "install_wide_where_slow", lambda *_: None
        )


def started(level: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-12)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0, **more)
    scaled_backward(model(X).sum(), optimizer)
    optimizer.step()
    return model.eval()


def exported(model: nn.Module) -> Callable[..., Any]:
    return torch.export.export(model, (X,), strict=False).module()


def traced(model: nn.Module) -> Callable[..., Any]:
    return torch.jit.trace(model, (X,))  # type: ignore[no-untyped-call]


def scripted(model: nn.Module) -> Callable[..., Any]:
    return torch.jit.script(model)


@pytest.mark.usefixtures("products")
@levels
@pytest.mark.parametrize("make", [exported, traced])
def test_a_program_computes_what_its_model_does(level: str, make: Any) -> None:
    if make is exported and level in CASTING_FUNCTIONS:
        make = traced  # which is refused the other
    model = started(level)
    program = make(model)
    with torch.no_grad():
        wanted = model(X)
        assert wanted.isfinite().all()
        assert_same(program(X), wanted)
        preamp.engine_of(model).close()
        if BY_NAME[level].weight is torch.float32:  # it has the model's weights
            assert_same(program(X), wanted)


@pytest.fixture
def strict_knows_hooks() -> None:
    """Strict exports of torch until 2.8 fail at any hook of a model."""
    model = nn.Linear(3, 3)
    model.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    try:
        torch.export.export(model, (torch.ones(2, 3),), strict=True)
    except (RuntimeError, AssertionError):
        pytest.skip("this torch cannot export models with hooks in strict mode")


@pytest.mark.usefixtures("strict_knows_hooks")
@casting
@pytest.mark.parametrize("scope", ["model", "thread"])
@pytest.mark.parametrize("strict", [False, pytest.param(True, marks=pytest.mark.full)])
def test_exports_of_casts_are_refused(level: str, scope: Any, strict: bool) -> None:
    """A program would forget what a hook sets. Nothing stays on."""
    model = started(level, scope=scope)
    wanted = model(X)
    with refused("export", "an export of casts"):
        torch.export.export(model, (X,), strict=strict)
    assert_same(model(X), wanted)


@levels
def test_scripting_a_model_with_an_engine_is_refused(level: str) -> None:
    model = started(level)
    for whole in (model, nn.Sequential(model)):
        with refused("export", "a script of a model with an engine"):
            torch.jit.script(whole)
    preamp.engine_of(model).close()
    with torch.no_grad():
        assert_same(scripted(model)(X), model(X))
