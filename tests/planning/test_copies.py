# SPDX-License-Identifier: BSD-3-Clause
"""Every level starts from the same state, and the caller's is left alone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from preamp.planning.isolation import Task, copies_of

calls_by_name = torch.zeros(())


def task(loss_fn: Any, batch: Any = None) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return Task(model, optimizer, loss_fn, torch.randn(16, 8) if batch is None else batch)


def report_of(task: Task, **options: Any) -> preamp.planning.PlanReport:
    given = {"levels": ["O1", "O2", "O5"], "steps": 2, "verify_steps": 3, **options}
    return preamp.plan(task.model, task.loss_fn, task.batch, task.optimizer, **given)


def grown(model: nn.Module, batch: Any, calls: torch.Tensor) -> torch.Tensor:
    """A loss that is larger at each call by more than any level may be off."""
    calls += 1
    return (1 + calls) * (1 + model(batch).float().square().mean())


class Criterion(nn.Module):
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return grown(model, batch, self.calls)


def by_name(model: nn.Module, batch: Any) -> torch.Tensor:
    return helper(model, batch)


def helper(model: nn.Module, batch: Any, depth: int = 1) -> torch.Tensor:
    return helper(model, batch, depth - 1) if depth else grown(model, batch, calls_by_name)


def by_closure() -> tuple[Any, torch.Tensor]:
    calls = torch.zeros(())

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        def in_it() -> torch.Tensor:
            return grown(model, batch, calls)

        return in_it()

    return loss_fn, calls


def by_a_helper() -> tuple[Any, torch.Tensor]:
    inner, calls = by_closure()
    return lambda model, batch: inner(model, batch), calls


def by_a_decorator() -> tuple[Any, torch.Tensor]:
    inner, calls = by_closure()
    return torch.enable_grad()(inner), calls


def by_a_default() -> tuple[Any, torch.Tensor]:
    calls = torch.zeros(())

    def loss_fn(model: nn.Module, batch: Any, calls: torch.Tensor = calls) -> torch.Tensor:
        return grown(model, batch, calls)

    return loss_fn, calls


def by_partial() -> tuple[Any, torch.Tensor]:
    calls = torch.zeros(())
    return functools.partial(grown, calls=calls), calls


def by_module() -> tuple[Any, torch.Tensor]:
    criterion = Criterion()
    return criterion, criterion.calls


def by_method() -> tuple[Any, torch.Tensor]:
    criterion = Criterion()
    return criterion.forward, criterion.calls


STATES: tuple[Callable[[], tuple[Any, torch.Tensor]], ...] = (
    *(by_closure, by_a_helper, by_a_decorator, by_a_default, by_partial, by_module, by_method),
    lambda: (by_name, calls_by_name),
)


@pytest.mark.parametrize("make", STATES)
def test_the_state_of_a_loss_is_the_same_for_every_level(
    make: Callable[[], tuple[Any, torch.Tensor]],
) -> None:
    loss_fn, calls = make()
    report = report_of(task(loss_fn))
    first, _, third = report.fp32_losses
    assert third == pytest.approx(2 * first, rel=0.05)
    assert all(plan.fits for plan in report.levels.values()), str(report)
    assert calls == 0


def test_random_numbers_of_a_losss_own_are_the_same_for_every_level() -> None:
    own = torch.Generator().manual_seed(0)
    before = own.get_state()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * torch.randn(16, 1, generator=own).exp().square()).float().sum()

    report = report_of(task(loss_fn))
    assert all(plan.fits for plan in report.levels.values()), str(report)
    assert torch.equal(own.get_state(), before)


def test_a_batch_that_is_written_to_is_the_same_for_every_level() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"].mul_(1.5)
        return 1 + model(batch["x"]).float().square().mean()

    batch = {"x": torch.randn(16, 8)}
    before = batch["x"].clone()
    report = report_of(task(loss_fn, batch))
    assert all(plan.fits for plan in report.levels.values()), str(report)
    assert torch.equal(batch["x"], before)


def test_what_a_loss_knows_of_the_model_are_the_copys_weights() -> None:
    given = task(None)
    weights = [*given.model.parameters()]
    for loss_fn in (
        lambda model, batch: sum(w.float().square().sum() for w in weights),
        functools.partial(lambda known, model, batch: known(batch).float().mean(), given.model),
    ):
        copies = copies_of(model=given.model, optimizer=given.optimizer, loss_fn=loss_fn)
        copies["loss_fn"](copies["model"], given.batch).backward()
        assert all(param.grad is not None for param in copies["model"].parameters())
        assert all(weight.grad is None for weight in weights)


def test_a_variable_without_a_value_yet_is_left_so() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        nonlocal known
        known = 1.0
        return known * model(batch).float().square().mean()

    if not loss_fn:
        known = 0.0
    assert report_of(task(loss_fn), levels=["O5"]).levels["O5"].fits


def test_what_cannot_be_copied_is_refused_by_name() -> None:
    lock = threading.Lock()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        with lock:
            return model(batch).float().square().mean()

    with pytest.raises(ValueError, match="'lock', which loss_fn uses, cannot be copied: "):
        report_of(task(loss_fn))
    batch = (row for row in torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"The argument batch .* Move what cannot be copied"):
        report_of(task(lambda model, rows: model(next(rows)).float().mean(), batch))


bound: Any = functools.partial(nn.functional.layer_norm, normalized_shape=(1,))
again: Any = functools.partial(lambda model, batch, depth: around(model, batch, depth), depth=0)


def around(model: nn.Module, batch: Any, depth: int = 1) -> torch.Tensor:
    return again(model, batch) if depth else model(batch).float().square().mean()


def test_functions_that_use_each_other_or_a_librarys_are_copied_once() -> None:
    copied = copies_of(model=nn.Linear(1, 1), loss_fn=around)["loss_fn"]
    scope = copied.__globals__
    assert scope is not around.__globals__
    assert scope["again"].func.__globals__ is scope
    assert scope["around"] is copied
    copied = copies_of(model=nn.Linear(1, 1), loss_fn=lambda model, batch: bound(model(batch)))
    assert copied["loss_fn"].__globals__["bound"].func is nn.functional.layer_norm
    assert all(plan.fits for plan in report_of(task(around)).levels.values())


@torch.jit.script
def compiled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_compiled_function_that_cannot_be_copied_is_no_state() -> None:
    report = report_of(task(lambda model, batch: compiled(model(batch)).float().mean()))
    assert all(plan.fits for plan in report.levels.values())


def penalty(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    x = batch.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.float().square().mean() + (grad.float().norm(dim=1) - 1).square().mean()


def test_a_loss_that_takes_gradients_itself_is_planned() -> None:
    report = report_of(task(penalty))
    assert all(plan.fits for plan in report.levels.values()), str(report)
    assert all(plan.tensors for plan in report.levels.values())
    assert all(plan.memory.peak for plan in report.levels.values())


def test_gradients_that_a_loss_takes_itself_do_not_lower_the_loss_scale() -> None:
    """The slope is 1 everywhere; only what comes back from the loss bears its scale."""
    report = report_of(task(lambda model, batch: 1e-6 * penalty(model, batch)), levels=["O2"])
    assert report.loss_scale == 2.0**24


def in_half(raises: Callable[[], Exception | KeyboardInterrupt]) -> Any:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(model.parameters()).dtype is torch.bfloat16:
            raise raises()
        return model(batch).float().square().mean()

    return loss_fn


@pytest.mark.parametrize(
    "kind", [torch.OutOfMemoryError, MemoryError, lambda text: RuntimeError(f"DefaultCPUAll{text}")]
)
def test_a_lack_of_memory_is_not_laid_to_the_level(kind: Callable[[str], Exception]) -> None:
    report = report_of(task(in_half(lambda: kind("ocator: no memory for 9 GiB"))))
    (problem,) = report.levels["O5"].problems
    assert (problem.kind, report.levels["O5"].rests_on) == ("memory", "an error")
    assert problem.text.startswith("It could not be tried: with the caller's own model")
    assert "no memory for 9 GiB" in problem.text
    assert " with storage=" in problem.text
    assert report.levels["O1"].fits


def test_a_bug_of_the_program_is_told_with_its_line() -> None:
    report = report_of(task(in_half(lambda: NameError("name 'x' is not defined"))))
    (problem,) = report.levels["O5"].problems
    assert problem.text.startswith("NameError: name 'x' is not defined (at ")
    assert "test_copies.py:" in problem.text


def test_an_interrupt_ends_the_plan() -> None:
    with pytest.raises(KeyboardInterrupt):
        report_of(task(in_half(KeyboardInterrupt)))


def test_a_lack_of_memory_for_a_copy_is_not_told_as_something_uncopyable() -> None:
    class Full:
        def __deepcopy__(self, memo: object) -> None:
            raise torch.OutOfMemoryError("out of memory")

    given = task(lambda model, batch: model(batch[0]).float().mean(), (torch.ones(4, 8), Full()))
    with pytest.raises(preamp.PreampUnavailableError, match="no memory for a float32 copy") as told:
        report_of(given)
    assert ": out of memory. At O0 " in str(told.value)
    assert ' with storage="split". ' in str(told.value)
