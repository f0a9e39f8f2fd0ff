# SPDX-License-Identifier: BSD-3-Clause
"""Whoever writes to weights or looks at them, by whatever door, finds what plain torch has.

Each test makes the same calls on an initialized model and on float32 weights without any engine,
on numbers that half precision holds exactly, and wants the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import preamp
import preamp.optimizers
from cases.levels import WITH_MASTERS
from cases.models import Parts
from cases.tolerances import assert_same
from kit.compare import halves_match
from kit.loops import begin, scaled_backward
from kit.pair import Pair

with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


# -- exact weights, copies and averages ------------------------------------------------------------


class BodyError(Exception):
    """What the body of a block raises; preamp itself never does."""


class Bowl(nn.Module):
    """Two weight vectors whose gradients depend on them; exact on small integers."""

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Parameter(torch.full((4,), 4.0))
        self.flat = nn.Parameter(torch.full((4,), -4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.deep * x).square().sum() / 2 + self.flat.square().sum() / 2


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
def test_what_is_written_to_weights_without_masters_is_rounded(level: str) -> None:
    model, _ = mixture(level, "one layer")
    held = [model.frozen.weight, model.other.weight, model.mix]
    with preamp.engine_of(model).exact_weights(), torch.no_grad():
        for tensor in held:
            tensor.fill_(1.0 + 2.0**-20)
        held[1].data.mul_(2)
    for tensor, value in zip(held, (1.0, 2.0, 1.0), strict=True):
        assert_same(tensor.detach(), torch.full_like(tensor, value))
    assert model(torch.ones(3, 4)).dtype is torch.float32


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


# -- optimizers that move weights between steps ----------------------------------------------------


def check_halves_at_forward(pair: Pair) -> None:
    """The next forward sees the masters as they are, rounded."""
    seen: list[torch.Tensor] = []

    def look(module: nn.Module, inputs: Any) -> None:
        del inputs
        seen.extend(p.detach().clone() for p in module.parameters())

    with pair.model.register_forward_pre_hook(look), torch.no_grad():
        pair.model(torch.ones(4) if isinstance(pair.model, Bowl) else torch.ones(2, 3))
    wanted = [p.detach() for g in pair.plain_optimizer.param_groups for p in g["params"]]
    for ours, theirs in zip(seen, wanted, strict=True):
        assert_same(ours, theirs.to(ours.dtype))
    assert halves_match(pair.model)


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free SGD: trains at y, evaluates at x, between which train() and eval() move.

    It moves the parameters, their ``data``, of which torch counts no write, or a buffer that all of
    them lie in.
    """

    def __init__(self, params: Iterable[Any], how: str = "parameters") -> None:
        super().__init__(params, {"lr": 2.0**-3})
        self.how, given = how, self.param_groups[0]["params"]
        flat = torch.cat([p.detach().reshape(-1) for p in given])
        parts = flat.split([p.numel() for p in given])
        self.views = [part.view(p.shape) for p, part in zip(given, parts, strict=True)]
        for p, view in zip(given, self.views, strict=True):
            if how == "buffer":
                p.data = view

    def each(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Parameters, and what is written to."""
        given = self.param_groups[0]["params"]
        kinds = {"parameters": given, "data": [p.data for p in given], "buffer": self.views}
        return list(zip(given, kinds[self.how], strict=True))

    @torch.no_grad()
    def move(self, by: float) -> None:
        for p, x in self.each():
            if "z" in self.state[p]:
                x.lerp_(end=self.state[p]["z"], weight=by)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for p, x in self.each():
            if p.grad is not None:
                z = self.state[p].setdefault("z", p.clone())
                x.lerp_(end=z, weight=0.5)
                x.add_(p.grad, alpha=-(2.0**-5))
                z.sub_(p.grad, alpha=2.0**-3)


@with_masters
@pytest.mark.parametrize("how", ["parameters", "data", "buffer"])
def test_what_schedule_free_moves_counts(level: str, how: str) -> None:
    """In the next forward, the state and the next step, after a load as well."""
    pair = Pair(level, lambda params: ScheduleFree(params, how))
    both: Any = (pair.optimizer, pair.plain_optimizer)
    for index in range(3):
        pair.train(index)
        for owner in (pair.model, pair.optimizer, pair.engine) if index == 1 else ():
            owner.load_state_dict(copy.deepcopy(owner.state_dict()))
        for optimizer in both:
            optimizer.move(-1.0)  # eval()
        check_halves_at_forward(pair)
        for key, value in pair.model.state_dict().items():
            assert_same(value, pair.plain.state_dict()[key], key)
        for optimizer in both:
            optimizer.move(0.5)  # train()
    check_halves_at_forward(pair)
    pair.check()


@with_masters
def test_writes_through_data_between_a_forward_and_its_backward(level: str) -> None:
    """The backward computes with what is written, as in torch, which counts no write either."""
    pair = Pair(level, lambda ps: torch.optim.SGD(ps, lr=0.5), Bowl, loss_scale=128.0)
    losses = [model(torch.ones(4)).float() for model in (pair.model, pair.plain)]
    for param in (*pair.masters, *pair.plain.parameters()):
        param.data.mul_(0.5)
    check_halves_at_forward(pair)
    scaled_backward(losses[0], pair.optimizer)
    losses[1].backward()
    pair.step()
    pair.check()


class _Failing(torch.optim.Optimizer):
    """Updates its first parameter, then fails."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)
            raise ArithmeticError


@with_masters
def test_a_step_that_fails_half_way_leaves_no_stale_half_weight(level: str) -> None:
    model = Parts()
    optimizer = begin(level, model, _Failing(model.parameters()), loss_scale=64.0)
    scaled_backward(model(torch.ones(2, 3)).float().sum(), optimizer)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    engine = preamp.engine_of(model)
    assert all(engine.master_of(param) is not None for param in model.parameters())
    assert halves_match(model)


# -- writes to half weights that leave no version behind -------------------------------------------


# -- the older wrappers ----------------------------------------------------------------------------
