# SPDX-License-Identifier: BSD-3-Clause
"""A step is traced on copies, and what the caller has is left alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.memory.copies import copies_of

BATCH = torch.randn(16, 8)
calls_by_name: list[int] = []


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def activations(loss_fn: Any, batch: Any = BATCH) -> int | None:
    return preamp.estimate(model(), "O2", loss_fn=loss_fn, batch=batch).activations


def square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).float().square().mean()


def counted(model: nn.Module, batch: Any, calls: list[int]) -> torch.Tensor:
    """A loss that notes that it was called."""
    calls.append(len(calls))
    return square(model, batch)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return counted(model, batch, self.calls)


def by_name(model: nn.Module, batch: Any) -> torch.Tensor:
    return helper(model, batch)


def helper(model: nn.Module, batch: Any, depth: int = 1) -> torch.Tensor:
    return helper(model, batch, depth - 1) if depth else counted(model, batch, calls_by_name)


def by_closure() -> tuple[Any, list[int]]:
    calls: list[int] = []

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        def in_it() -> torch.Tensor:
            return counted(model, batch, calls)

        return in_it()

    return loss_fn, calls


def by_a_helper() -> tuple[Any, list[int]]:
    inner, calls = by_closure()
    return lambda model, batch: inner(model, batch), calls


def by_a_decorator() -> tuple[Any, list[int]]:
    inner, calls = by_closure()
    return torch.enable_grad()(inner), calls


def by_a_default() -> tuple[Any, list[int]]:
    calls: list[int] = []

    def loss_fn(model: nn.Module, batch: Any, calls: list[int] = calls) -> torch.Tensor:
        return counted(model, batch, calls)

    return loss_fn, calls


def by_partial() -> tuple[Any, list[int]]:
    calls: list[int] = []
    return functools.partial(counted, calls=calls), calls


def by_module() -> tuple[Any, list[int]]:
    criterion = Criterion()
    return criterion, criterion.calls


def by_method() -> tuple[Any, list[int]]:
    criterion = Criterion()
    return criterion.forward, criterion.calls


STATES: tuple[Callable[[], tuple[Any, list[int]]], ...] = (
    *(by_closure, by_a_helper, by_a_decorator, by_a_default, by_partial, by_module, by_method),
    lambda: (by_name, calls_by_name),
)


@pytest.mark.parametrize("make", STATES)
def test_the_state_of_a_loss_is_left_alone(make: Callable[[], tuple[Any, list[int]]]) -> None:
    loss_fn, calls = make()
    assert activations(loss_fn) == activations(square)
    assert calls == []


def test_a_batch_that_is_written_to_is_left_alone() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].mul_(1.5)
        return square(model, batch["x"])

    batch = {"x": BATCH.clone()}
    assert activations(loss_fn, batch)
    assert torch.equal(batch["x"], BATCH)


def test_what_a_loss_knows_of_the_model_are_the_copys_weights() -> None:
    given = model()
    weights = [*given.parameters()]
    for loss_fn in (
        lambda model, batch: sum((w.float().square().sum() for w in weights), torch.zeros(())),
        functools.partial(lambda known, model, batch: square(known, batch), given),
    ):
        twin, of_twin, batch = copies_of(given, loss_fn, BATCH, {})
        of_twin(twin, batch).backward()
        assert all(param.grad is not None for param in twin.parameters())
        assert all(weight.grad is None for weight in weights)


def test_a_variable_without_a_value_yet_is_left_so() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal known
        known = 1.0
        return known * square(model, batch)

    if not loss_fn:
        known = 0.0
    assert activations(loss_fn)


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    lock = threading.Lock()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with lock:
            return square(model, batch)

    with pytest.raises(ValueError, match="'lock', which loss_fn uses, cannot be copied: "):
        activations(loss_fn)
    batch = (row for row in torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"The argument batch .* Move what cannot be copied"):
        activations(lambda model, rows: square(model, next(rows)), batch)


bound: Any = functools.partial(nn.functional.layer_norm, normalized_shape=(1,))
again: Any = functools.partial(lambda model, batch, depth: around(model, batch, depth), depth=0)


def around(model: nn.Module, batch: Any, depth: int = 1) -> torch.Tensor:
    return again(model, batch) if depth else square(model, batch)


def test_functions_that_use_each_other_or_a_librarys_are_copied_once() -> None:
    _, copied, _ = copies_of(nn.Linear(1, 1), around, None, {})
    scope: dict[str, Any] = copied.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    assert scope is not around.__globals__
    assert scope["again"].func.__globals__ is scope
    assert scope["around"] is copied
    _, copied, _ = copies_of(nn.Linear(1, 1), lambda model, batch: bound(model(batch)), None, {})
    scope = copied.__globals__  # pyright: ignore[reportFunctionMemberAccess]
    assert scope["bound"].func is nn.functional.layer_norm
    assert activations(around)


@torch.jit.script
def compiled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_compiled_function_that_cannot_be_copied_is_no_state() -> None:
    assert activations(lambda model, batch: compiled(model(batch)).float().mean())


def penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x = batch.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.float().square().mean() + (grad.float().norm(dim=1) - 1).square().mean()


def test_a_loss_that_takes_gradients_itself_is_traced() -> None:
    assert activations(penalty)
