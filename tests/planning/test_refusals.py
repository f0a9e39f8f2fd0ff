# SPDX-License-Identifier: BSD-3-Clause
"""What a plan is refused for, and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import preamp


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def _initialized() -> nn.Module:
    model = nn.Linear(4, 4)
    preamp.initialize(model, opt_level="O1", verbosity=0)
    return model


def _elsewhere(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    del model
    return batch.mean().requires_grad_()


def _infinite(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean() / 0.0


def _vector(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def _zero(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch) * 0.0).mean()


def _detached(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean().detach()


def _dead() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    nn.init.constant_(model[0].bias, -100.0)  # pyright: ignore[reportArgumentType]
    return model


NOTHING = ("Nothing can be concluded: every gradient was zero", "follow from", "Pass a batch")
UNTRAINABLE = ("has no parameter that requires a gradient", "follows from", "Pass the model")
CALLED = ("loss_fn(model, batch) returns a scalar", "in this order")


@pytest.mark.parametrize(
    ("arguments", "kind", "parts"),
    [
        ({"loss_fn": _zero}, ValueError, NOTHING),
        ({"model": _dead()}, ValueError, NOTHING),
        ({"loss_fn": _detached}, ValueError, ("detached from", "autograd records", "Leave out")),
        ({"model": nn.Identity()}, ValueError, UNTRAINABLE),
        ({"model": nn.Linear(4, 4).requires_grad_(False)}, ValueError, UNTRAINABLE),
        ({"loss_fn": torch.ones(1)}, TypeError, ("loss_fn is Tensor, which cannot", *CALLED)),
        ({"loss_fn": lambda model: model}, TypeError, ("too many positional", *CALLED)),
        ({"optimizer": "Adam"}, TypeError, ("Got str in", "steps the", "leave it out for AdamW")),
        (
            {"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
            ValueError,
            ("no parameter of the model", "both together", "leave it out"),
        ),
        ({"model": nn.Linear}, TypeError, ("Got type", "nn.Module", "preamp.estimate")),
        ({"model": nn.Linear(4, 4).half()}, ValueError, ("float16 already", "float32", "float()")),
        ({"loss_fn": _elsewhere}, ValueError, ("No parameter", "is a copy", "Use the argument")),
        ({"loss_fn": _infinite}, ValueError, ("inf in float32", "finite scalar", "Reduce")),
        ({"loss_fn": _vector}, ValueError, ("shape (8, 4)", "finite scalar", "mean()")),
        ({"levels": ["O9"]}, preamp.PreampPolicyError, ("'O9'", "Choose one of", "letter O")),
        ({"levels": ["O0"]}, ValueError, ("levels=['O0']", "compared with", "at least one")),
        ({"levels": []}, ValueError, ("levels=[]", "compared with", "at least one")),
        ({"steps": 0}, ValueError, ("steps=0", "from 1", "Leave steps out")),
        ({"verify_steps": -1}, ValueError, ("verify_steps=-1", "from 0", "Leave verify_steps")),
    ],
)
def test_refusals_say_what_is_allowed(
    arguments: dict[str, Any], kind: type[Exception], parts: tuple[str, ...]
) -> None:
    given = {"model": nn.Linear(4, 4), "loss_fn": mean_square, "batch": torch.ones(8, 4)}
    with pytest.raises(kind) as caught:
        preamp.plan(**{**given, **arguments})
    for part in parts:
        assert part in str(caught.value)


def test_an_optimizer_that_needs_a_closure_is_refused() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(ValueError, match=r"LBFGS\.step needs a closure\. plan takes steps from"):
        preamp.plan(model, mean_square, torch.ones(2, 4), optimizer)


def test_an_initialized_model_is_refused() -> None:
    with pytest.raises(preamp.PreampStateError, match="initialized already"):
        preamp.plan(_initialized(), mean_square, torch.ones(8, 4))


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = nn.Linear(4, 4)
    model.lock = open(__file__)  # type: ignore[assignment]
    with model.lock, pytest.raises(ValueError, match="cannot be copied"):  # type: ignore[union-attr]
        preamp.plan(model, mean_square, torch.ones(8, 4))
