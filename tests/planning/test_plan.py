# SPDX-License-Identifier: BSD-3-Clause
"""Verdicts on trainings whose trouble is known, and that planning leaves no trace."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp
from cases.trainings import CASES, Case
from preamp.optimizers import FusedAdam
from preamp.planning.planner import policies_of
from preamp.planning.records import PlanReport


@pytest.fixture(scope="module")
def reports() -> dict[str, PlanReport]:
    return {}


def report_of(case: Case, reports: dict[str, PlanReport]) -> PlanReport:
    if case.name not in reports:
        reports[case.name] = preamp.plan(*case.make())
    return reports[case.name]


@pytest.mark.parametrize("name", CASES)
def test_the_verdict_is_right(name: str, reports: dict[str, PlanReport]) -> None:
    case = CASES[name]
    report = report_of(case, reports)
    assert report.recommended == case.recommended, str(report)
    for level in case.fits:
        assert report.levels[level].fits, str(report)
    for level, (kind, part) in case.fails.items():
        problems = report.levels[level].problems
        assert any(p.kind == kind and part in p.name for p in problems), str(report)


@pytest.mark.parametrize("name", CASES)
def test_the_recommended_level_was_tried(name: str, reports: dict[str, PlanReport]) -> None:
    report = report_of(CASES[name], reports)
    for level in (report.recommended, report.runner_up):
        tried = report.levels[str(level)].verification
        assert tried is not None
        assert tried.holds
        assert len(tried.losses) == len(report.fp32_losses) == 8


@pytest.mark.parametrize("name", CASES)
def test_no_gradient_overflows_at_the_recommended_scale(
    name: str, reports: dict[str, PlanReport]
) -> None:
    report = report_of(CASES[name], reports)
    best = report.levels[report.recommended]
    assert best.verification is not None
    assert best.verification.skipped == 0
    gradients = [t for t in best.tensors if t.what == "gradient"]
    assert gradients
    assert not any(t.overflows for t in gradients)


def test_tiny_gradients_need_a_scale_and_get_it(reports: dict[str, PlanReport]) -> None:
    report = report_of(CASES["tiny-gradients"], reports)
    gradients = [t for t in report.levels["O2"].tensors if t.what == "gradient"]
    nonzero = sum(t.nonzero for t in gradients)
    assert sum(t.lost_unscaled for t in gradients) > 0.5 * nonzero
    assert sum(t.lost for t in gradients) < 0.001 * nonzero
    assert report.levels["O2"].loss_scale >= 2.0**20
    chosen = preamp.plan(*CASES["tiny-gradients"].make(), levels=["O2"])
    assert chosen.loss_scale == report.levels["O2"].loss_scale
    assert any("would vanish" in reason for reason in chosen.reasons)


def test_bfloat16_needs_no_scale(reports: dict[str, PlanReport]) -> None:
    report = report_of(CASES["healthy-bfloat16"], reports)
    assert report.loss_scale == 1.0
    assert report.levels["O2"].is_tight
    assert not report.levels["O5"].is_tight


def test_a_float32_batch_norm_is_not_blamed(reports: dict[str, PlanReport]) -> None:
    report = report_of(CASES["batch-norm"], reports)
    held = {level: {t.name for t in plan.tensors} for level, plan in report.levels.items()}
    assert "0.running_var" in held["O3"]
    assert "0.running_var" not in held["O1"] | held["O2"]


def test_text_and_json(reports: dict[str, PlanReport]) -> None:
    report = report_of(CASES["attention-logits"], reports)
    text = str(report)
    assert text.startswith(f"Recommended: {report.recommended}\n")
    assert f'opt_level="{report.recommended}"' in text
    assert "bmm reaches 1.02e+05; float16 ends at 65504" in text
    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["recommended"] == report.recommended
    assert data["levels"]["O2"]["fits"] is False
    assert data["levels"]["O2"]["problems"][0]["kind"] == "overflow"
    assert data["levels"]["O5"]["memory"]["opt_level"] == "O5"


class Noisy(nn.Module):
    """Draws random numbers and changes buffers in its forward."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.norm(self.linear(x * random.random() * np.random.rand())))


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).float().square().mean()


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    state: Any = copy.deepcopy(optimizer.state_dict())
    return [
        copy.deepcopy(model.state_dict()),
        state["state"],
        [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]],
        torch.get_rng_state(),
        list(random.getstate()[1]),
        list(np.random.get_state()[1]),  # type: ignore[arg-type,index]
        [p.grad for p in model.parameters()],
        [id(p) for group in optimizer.param_groups for p in group["params"]],
    ]


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for key in value:
            yield key
            yield from leaves(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def assert_same(before: list[Any], after: list[Any]) -> None:
    for one, other in zip(leaves(before), leaves(after), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype is other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    )


@pytest.mark.parametrize("with_state", [False, True])
def test_the_caller_keeps_everything(with_state: bool) -> None:
    model = Noisy()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch = torch.randn(8, 6)
    if with_state:
        mean_square(model, batch).backward()
        optimizer.step()
    before = snapshot(model, optimizer)
    preamp.plan(model, mean_square, batch, optimizer, levels=["O1", "O2"], steps=2, verify_steps=2)
    assert_same(before, snapshot(model, optimizer))
    assert hooks_of(model) == 0
    assert not optimizer._optimizer_step_pre_hooks
    assert not torch.is_autocast_enabled("cpu")


class Shared(list[int]):
    """Knows of what happens in copies, too."""

    def __deepcopy__(self, memo: object) -> Shared:
        return self


@pytest.mark.parametrize("call", range(12))
def test_the_caller_keeps_everything_when_a_forward_fails(call: int) -> None:
    model = Noisy()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    calls = Shared()

    def failing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        loss = mean_square(model, batch)
        if len(calls) > call:
            raise KeyError("a forward fails")
        return loss

    batch = torch.randn(8, 6)
    before = snapshot(model, optimizer)
    softmax = F.softmax
    with pytest.raises(KeyError, match="a forward fails"):
        preamp.plan(model, failing, batch, optimizer, levels=["O1"], steps=2, verify_steps=20)
    assert_same(before, snapshot(model, optimizer))
    assert hooks_of(model) == 0
    assert F.softmax is softmax
    assert not torch.is_autocast_enabled("cpu")


def test_a_plan_is_repeatable() -> None:
    model, batch = Noisy(), torch.randn(8, 6)
    first = preamp.plan(model, mean_square, batch, levels=["O5"], steps=2, verify_steps=2)
    again = preamp.plan(model, mean_square, batch, levels=["O5"], steps=2, verify_steps=2)
    # Python's and numpy's random numbers are the same in both too.
    assert first == again


def test_a_storage_is_planned_and_tried() -> None:
    model, batch = nn.Linear(64, 96), torch.randn(8, 64)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    levels = policies_of(["O5"], "compact")
    options: Any = {"steps": 1, "verify_steps": 2}
    report = preamp.plan(model, mean_square, batch, optimizer, levels=levels, **options)
    assert report.levels["O5"].memory == preamp.estimate(
        model, levels["O5"], optimizer, loss_fn=mean_square, batch=batch
    )
    assert report.levels["O5"].memory.storage == "compact"
    assert report.levels["O5"].verification is not None
    assert report.levels["O5"].verification.holds
    assert policies_of(["O1"], "compact")["O1"].storage == preamp.Storage(moments="8bit")
    refused = {"O1": preamp.OPT_LEVELS["O1"].replace(storage="split")}
    with pytest.raises(preamp.PreampPolicyError, match="which has no masters"):
        preamp.plan(model, mean_square, batch, optimizer, levels=refused)


def test_a_storage_that_releases_gradients_is_planned_and_tried() -> None:
    model, batch = nn.Linear(64, 96), torch.randn(8, 64)
    optimizer = FusedAdam(model.parameters(), lr=1e-3)
    storage = preamp.Storage(masters="split", release_gradients=True)
    levels = policies_of(["O2", "O5"], storage)
    assert not levels["O2"].storage.release_gradients  # its loss scale is dynamic
    report = preamp.plan(
        model, mean_square, batch, optimizer, levels=levels, steps=1, verify_steps=2
    )
    assert report.levels["O5"].memory.gradients == 0 < report.levels["O2"].memory.gradients
    assert report.levels["O5"].verification is not None
    assert report.levels["O5"].verification.holds
    code = "preamp.Storage(masters='split', release_gradients=True)"
    assert report.recommended != "O5" or code in str(report)


def test_a_forward_that_looks_at_values_can_be_planned() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = model(batch).float().square().mean()
        return loss if loss.item() > 0 else -loss

    report = preamp.plan(nn.Linear(4, 4), loss_fn, torch.randn(8, 4), levels=["O2"], verify_steps=2)
    plan = report.levels["O2"]
    assert plan.memory.peak is None
    assert report.recommended == "O2"


def test_nothing_fits() -> None:
    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch).float() * 1e-5).square().mean()

    report = preamp.plan(nn.Linear(4, 4), loss_fn, 1e6 * torch.ones(8, 4), levels=["O2", "O3"])
    assert report.recommended == "O0"
    assert report.runner_up is None
    assert report.loss_scale == 1.0
    assert "No level fits" in str(report)


@pytest.mark.parametrize(("steps", "part"), [(2, "at one of"), (8, "averaged over a quarter of")])
def test_losses_that_leave_float32s_are_a_problem(steps: int, part: str) -> None:
    # Sums to something only while every digit of 1 + 2**-12 is there.
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1 + 2.0**-12)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch).float() - 1).square().mean() * 2.0**24

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    given = model, loss_fn, torch.ones(4, 1), optimizer
    report = preamp.plan(*given, levels=["O2", "O5"], verify_steps=steps)
    assert report.recommended == "O0"
    for plan in report.levels.values():
        assert [problem.kind for problem in plan.problems] == ["losses"]
        assert f"In {steps} steps the loss, {part} them, came to" in plan.problems[0].text


def test_a_level_that_refuses_the_model_does_not_end_the_plan() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = preamp.plan(model, mean_square, torch.arange(8), optimizer, verify_steps=1)
    (problem,) = report.levels["O2"].problems
    assert problem.kind == "refused"
    assert "is sparse and the parameter has a float32 master" in problem.text
    assert {report.recommended, report.runner_up} == {"O1", "O4"}


class Inverting(nn.Module):
    """Inverts its weight, for which torch has no half kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.linalg.inv(self.weight)


def test_a_level_at_which_the_forward_raises_does_not_end_the_plan() -> None:
    report = preamp.plan(Inverting(), mean_square, torch.randn(8, 4), verify_steps=2)
    assert {name for name, plan in report.levels.items() if plan.fits} == {"O1", "O4"}
    (problem,) = report.levels["O2"].problems
    assert problem.kind == "refused"
    assert problem.text.startswith("RuntimeError: torch.linalg.inv at ")
    assert report.levels["O2"].loss_scale == 1.0


def test_an_operation_that_takes_float16_only_is_no_refusal() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert x.dtype is not torch.bfloat16, "no kernel"
            return x

    model = nn.Sequential(nn.Linear(4, 4), Inner())
    report = preamp.plan(model, mean_square, torch.randn(8, 4), verify_steps=2)
    assert report.levels["O1"].fits
    assert report.levels["O1"].tensors
    assert report.levels["O4"].problems[0].text.startswith("AssertionError: no kernel (at ")


class OnlyFloat32(torch.autograd.Function):
    """The same values; its backward has no half version."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
        assert grad.dtype is torch.float32, "no kernel"
        return grad


def test_a_backward_that_raises_at_a_level_does_not_end_the_plan() -> None:
    class Inner(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return OnlyFloat32.apply(x)  # pyright: ignore

    model = nn.Sequential(nn.Linear(4, 4), Inner(), nn.Linear(4, 4))
    report = preamp.plan(model, mean_square, torch.randn(8, 4), verify_steps=2)
    assert report.recommended == "O0"
    assert report.levels["O2"].problems[0].text.startswith("AssertionError: no kernel (at ")


def test_steps_that_were_all_skipped_verify_nothing() -> None:
    # Within the backward of the loss, where no forecast looks, large gradients overflow.
    class Overflowing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return value.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore
            return grad / (grad.abs().max() < 1)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return Overflowing.apply(model(batch)).float().square().mean()  # pyright: ignore

    plan = preamp.plan(
        nn.Linear(4, 4), loss_fn, torch.ones(8, 4), levels=["O2"], verify_steps=3
    ).levels["O2"]
    assert plan.verification is not None
    assert plan.verification.skipped == 3
    assert plan.problems[0].text.startswith("All 3 steps tried were skipped, from a loss scale of ")


def test_a_fused_optimizer_can_be_planned() -> None:
    model = nn.Linear(4, 4)
    optimizer = FusedAdam(model.parameters())
    report = preamp.plan(
        model, mean_square, torch.randn(8, 4), optimizer, levels=["O5"], verify_steps=2
    )
    assert report.recommended == "O5"
    assert report.levels["O5"].memory.master_gradients == 0
