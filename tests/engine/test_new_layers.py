# SPDX-License-Identifier: BSD-3-Clause
"""Layers that join a model after ``initialize``: heads, adapters, what replaces another layer."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, EXACT, HALF_WEIGHTS, WITH_MASTERS
from cases.models import Parts
from cases.tolerances import assert_same
from kit.pair import Pair

halves = pytest.mark.parametrize("level", HALF_WEIGHTS)
X = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.0, 1.0]])


class Adapted(nn.Module):
    """A layer, and one that is added to it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.extra = nn.Linear(3, 2, bias=False)
        nn.init.ones_(self.extra.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.extra(x)


class Scaled(nn.Module):
    """A layer without children: its weight is added to the result."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.shift = nn.Parameter(torch.full((2,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.shift


def replaced(model: Any) -> list[nn.Parameter]:
    torch.manual_seed(3)
    model.b = nn.Linear(3, 2)
    return list(model.b.parameters())


def adapted(model: Any) -> list[nn.Parameter]:
    model.b = Adapted(model.b)
    return list(model.b.extra.parameters())


def shifted(model: Any) -> list[nn.Parameter]:
    model.b = Scaled(model.b)
    return [model.b.shift]


def in_an_earlier_layer(model: Any) -> list[nn.Parameter]:
    model.b.bias = nn.Parameter(torch.full((2,), 1 / 3))
    return [model.b.bias]


def deep(model: Any) -> list[nn.Parameter]:
    torch.manual_seed(3)
    model.b = nn.Sequential(nn.Sequential(nn.Identity(), nn.Linear(3, 2)), nn.Identity())
    return list(model.b.parameters())


CHANGES = [replaced, adapted, shifted, in_an_earlier_layer, deep]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("level", "storage"),
    [*((level, "full") for level in EXACT), *((level, "split") for level in WITH_MASTERS)],
)
def test_it_trains_as_in_float32(level: str, change: Any, storage: str) -> None:
    pair = Pair(level, loss_scale=128.0, storage=storage)
    pair.train(0)
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        optimizer.add_param_group({"params": iter(change(model)), "lr": 0.25})
    for index in (1, 2, 3):
        pair.train(index)
        if storage == "full":  # split ones round ties otherwise
            pair.check(f"after step {index}")
    params = map(preamp.master_params, (pair.optimizer, pair.plain_optimizer))
    for ours, plain in zip(*params, strict=True):
        assert_same(ours.detach().clone(), plain.detach())
    for name, value in pair.plain.state_dict().items():
        assert_same(pair.model.state_dict()[name], value, name)


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("written", [False, True])
def test_a_layer_may_come_in_several_groups(level: str, written: bool) -> None:
    """As weights with decay and biases without; the first call has cast both."""
    pair = Pair(level, loss_scale=128.0)
    for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
        replaced(model)
        optimizer.add_param_group({"params": [model.b.weight], "weight_decay": 0.5})
        if written:
            with torch.no_grad():
                model.b.bias.fill_(0.75)
        optimizer.add_param_group({"params": [model.b.bias]})
    for index in range(3):
        for name, value in pair.plain.state_dict().items():
            assert_same(pair.model.state_dict()[name], value, name)
        pair.train(index)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("level", WITH_MASTERS)
def test_copies_loads_and_the_end_know_of_it(level: str, change: Any) -> None:
    pair = Pair(level, loss_scale=128.0)
    pair.optimizer.add_param_group({"params": change(pair.model)})
    pair.plain_optimizer.add_param_group({"params": change(pair.plain)})
    pair.train(0)
    saved = pair.model.state_dict()
    made = copy.deepcopy(pair.model)
    assert {p.dtype for p in made.parameters()} == {torch.float32}
    pair.train(1)
    pair.model.load_state_dict(saved)
    pair.plain.load_state_dict(saved)
    pair.train(2)
    pair.check()
    pair.engine.close()
    for name, value in pair.plain.state_dict().items():
        assert_same(pair.model.state_dict()[name], value, name)
        assert made.state_dict()[name].dtype is torch.float32
    assert not [n for part in pair.model.modules() for n in vars(part) if n == "__deepcopy__"]
    assert not any(len(part._forward_pre_hooks) for part in pair.model.modules())


class Headed(nn.Module):
    """A body, and a head that may be replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.BatchNorm1d(4))
        self.head: nn.Module = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def new_head() -> nn.Sequential:
    frozen = nn.Linear(4, 4).requires_grad_(False)
    return nn.Sequential(frozen, nn.LayerNorm(4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


@halves
def test_what_initialize_would_keep_in_float32_is_kept(level: str) -> None:
    model = Headed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    keeps = None if level == "O3" else nn.LayerNorm
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, keep_fp32=keeps)
    model.head = new_head()
    trained = [p for p in model.head.parameters() if p.requires_grad]
    optimizer.add_param_group({"params": trained})
    half, norm = BY_NAME[level].weight, BY_NAME[level].norm
    wide = half if keeps is None else torch.float32
    found = [next(layer.parameters()).dtype for layer in (*model.body, *model.head[:3])]
    assert found == [half, wide, norm, half, wide, norm]
    assert model.head[2].running_mean.dtype is norm
    with preamp.scale_loss(model(X).float().sum(), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_parameters_outside_of_the_model_stay_as_they_are(level: str) -> None:
    pair = Pair(level)
    outside = nn.Parameter(torch.ones(2))
    pair.model.b = nn.Linear(3, 2)
    pair.optimizer.add_param_group({"params": [outside]})
    assert outside.dtype is torch.float32
    assert pair.model.b.weight.dtype is torch.float32


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_within_a_block_it_is_refused(level: str) -> None:
    pair = Pair(level, loss_scale=128.0)
    head = nn.Linear(3, 2)
    text = (
        "add_param_group, of layers that were added to the model, was called inside a scale_loss "
        "block"
    )
    with preamp.scale_loss(pair.loss(0), pair.optimizer) as scaled:
        scaled.backward()
        pair.model.b = head
        with pytest.raises(preamp.PreampStateError, match=f"^{re.escape(text)}"):
            pair.optimizer.add_param_group({"params": head.parameters()})
    assert len(pair.optimizer.param_groups) == 1
    assert head.weight.dtype is torch.float32
    pair.optimizer.add_param_group({"params": head.parameters()})
    assert pair.engine.master_of(head.weight) is not None


@pytest.mark.parametrize("level", WITH_MASTERS)
@pytest.mark.parametrize("step", ["attach_layer_casts", "attach_state_hooks", "attach_copies"])
def test_a_failure_halfway_leaves_all_as_it_was(
    level: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(level, loss_scale=128.0)
    head = nn.Linear(3, 2)
    before = head.weight.detach().clone()
    pair.model.b = head

    def fail(*args: Any, **options: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(f"preamp.engine.layers.{step}", fail)
        with pytest.raises(MemoryError):
            pair.optimizer.add_param_group({"params": head.parameters()})
    assert len(pair.optimizer.param_groups) == 1
    assert torch.equal(head.weight, before)
    assert not any(vars(head)[name] for name in vars(head) if "_hooks" in name)
    pair.optimizer.add_param_group({"params": head.parameters()})
    assert torch.equal(pair.engine.master_of(head.weight), before)


@halves
def test_a_scripted_layer_is_refused(level: str) -> None:
    pair = Pair(level, loss_scale=128.0)
    pair.model.b = torch.jit.script(nn.Linear(3, 2))
    with pytest.raises(preamp.PreampStateError, match=r"^'b' of .* is a ScriptModule of Linear"):
        pair.optimizer.add_param_group({"params": pair.model.b.parameters()})
    assert len(pair.optimizer.param_groups) == 1
    assert pair.model.b.weight.dtype is torch.float32


def test_values_beyond_float16_are_refused_where_masters_are_split() -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level="O2", storage="split", verbosity=0)
    model.b = nn.Linear(3, 2)
    with torch.no_grad():
        model.b.weight.fill_(1e6)
    with pytest.raises(preamp.PreampStateError, match=r"^The weight 'b\.weight' has"):
        optimizer.add_param_group({"params": model.b.parameters()})
    assert len(optimizer.param_groups) == 1
    assert model.b.weight.dtype is torch.float32
