# SPDX-License-Identifier: BSD-3-Clause
"""Exact weights: what has a master beside what has none, within each other, and averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import preamp
import preamp.optimizers
from cases.levels import WITH_MASTERS
from cases.tolerances import assert_same
from kit.compare import halves_match
from kit.loops import scaled_backward, started, train_step

with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


class BodyError(Exception):
    """What the body of a block raises; preamp itself never does."""


class Mixture(nn.Module):
    """What has a master beside what has none: frozen, of no optimizer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.trained = nn.Linear(4, 4)
        self.other = nn.Linear(4, 2)
        self.register_buffer("mix", torch.full((4, 4), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.trained(self.norm(self.frozen(x)) @ self.mix))


TRAINED: dict[str, Callable[[Mixture], list[nn.Parameter]]] = {
    "one layer": lambda model: [*model.trained.parameters()],
    "biases": lambda model: [p for name, p in model.named_parameters() if name.endswith("bias")],
    "nothing": lambda model: [],
}


def mixture(level: str, trained: str, **more: Any) -> Any:
    torch.manual_seed(0)
    model = Mixture()
    model.frozen.requires_grad_(False)
    params = [p for p in TRAINED[trained](model) if p.requires_grad]
    optimizer = preamp.optimizers.FusedSGD(params, lr=0.5) if params else None
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **more)
    return model, optimizer


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in found if tensor.is_floating_point()}


@pytest.mark.each
@with_masters
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("storage", ["full", "split"])
def test_in_exact_weights_all_is_float32(level: str, trained: str, storage: str) -> None:
    model, optimizer = mixture(level, trained, storage=storage)
    if optimizer is not None:
        scaled_backward(model(torch.ones(3, 4)).sum(), optimizer)
        optimizer.step()
    model.eval()
    halves = {name: tensor.clone() for name, tensor in tensors_of(model).items()}
    average, plain, x = AveragedModel(model), copy.deepcopy(model), torch.randn(3, 4)
    with suppress(BodyError), preamp.engine_of(model).exact_weights():
        assert {t.dtype for t in tensors_of(model).values()} == {torch.float32}
        assert_same(model(x), plain(x))
        assert_same(model(x.half()), plain(x.half().float()))
        average.update_parameters(model)
        raise BodyError  # the weights go back whatever happens
    for name, tensor in tensors_of(model).items():
        assert_same(tensor, halves[name], name)
    for ours, wanted in zip(average.module.parameters(), plain.parameters(), strict=True):
        assert_same(ours.detach(), wanted.detach())


@with_masters
def test_exact_weights_within_exact_weights(level: str) -> None:
    model, optimizer = mixture(level, "one layer")
    engine, x = preamp.engine_of(model), torch.ones(3, 4)
    model.eval()
    with engine.exact_weights():
        wanted = model(x)
        with suppress(BodyError), engine.exact_weights(), torch.no_grad():
            model.trained.bias.add_(2.0**-20)
            raise BodyError
        assert {t.dtype for t in tensors_of(model).values()} == {torch.float32}
        model.trained.bias.data.sub_(2.0**-20)
        assert_same(model(x), wanted)
        model.trained.bias.data.add_(2.0**-20)
    assert model.trained.bias.dtype is not torch.float32
    assert_same(optimizer.param_groups[0]["params"][1].detach(), model.state_dict()["trained.bias"])
    with engine.exact_weights():
        assert model.trained.bias.dtype is torch.float32


@with_masters
def test_a_step_that_fails_half_way_leaves_no_stale_half_weight(level: str) -> None:
    model, optimizer = started(level)
    train_step(model, optimizer, 0)
    list(optimizer.state.values())[-1]["momentum_buffer"] = torch.ones(7, 7)
    with pytest.raises(RuntimeError, match="size"):
        train_step(model, optimizer, 1)
    assert halves_match(model)
