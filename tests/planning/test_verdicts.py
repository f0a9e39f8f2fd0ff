# SPDX-License-Identifier: BSD-3-Clause
"""Verdicts against what training at a level shows, and what they rest on."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from insight.plan import scores, train, truth_of
from insight.plan_cases import CASES, DESCRIBED, Training, mlp, pairs, square
from preamp.planning.isolation import Task
from preamp.planning.page import render
from preamp.planning.ranges import find_noise
from preamp.planning.recommend import candidates
from preamp.planning.records import PURE_BFLOAT16, LevelPlan, PlanReport
from preamp.planning.verify import Trained, compare

QUICK = ("unequal heads", "Adam's eps")


def report_of(training: Training, **options: Any) -> PlanReport:
    return preamp.plan(*training.make(), **options)


def task_of(training: Training) -> Task:
    model, loss_fn, batch, optimizer = training.make()
    return Task(model, optimizer, loss_fn, batch)


@pytest.mark.parametrize("name", QUICK)
def test_every_verdict_is_what_training_shows(name: str) -> None:
    report = report_of(CASES[name])
    expected = train(CASES[name], "O0", 1.0)
    assert expected is not None
    truth = truth_of(CASES[name], report, expected)
    for level, plan in report.levels.items():
        assert truth[level] in (None, plan.fits), f"{level}\n{report}"
    assert truth[report.recommended]


@pytest.mark.full
def test_most_verdicts_are_what_training_shows() -> None:
    verdicts, recommended = scores(every=15, offset=4)
    assert verdicts.cases >= 40
    assert verdicts.right >= 0.95 * verdicts.cases, verdicts.wrong
    assert not recommended.wrong


@pytest.mark.parametrize("name", list(DESCRIBED)[:4])
def test_forecasts_alone_know_of_heads_and_eps(name: str) -> None:
    report = report_of(CASES[name], verify_steps=0, levels=["O2", "O3", "O5"])
    assert {plan.rests_on for plan in report.levels.values()} == {"a forecast"}
    assert not report.levels["O3"].fits
    assert report.levels["O5"].fits
    assert report.levels["O2"].fits == (name != "unequal heads")


def test_an_eps_that_is_zero_in_half_is_named() -> None:
    plan = report_of(CASES["Adam's eps"], levels=["O3", "O2"]).levels["O3"]
    (problem,) = [problem for problem in plan.problems if problem.kind == "optimizer"]
    assert (problem.was_tried, plan.problems[-1].was_tried) == (False, True)
    assert problem.text.startswith("Adam's eps of 1e-08 is zero in float16")
    assert "Pass eps=1e-4" in problem.text
    safe = dataclasses.replace(
        CASES["Adam's eps"], optimizer=partial(torch.optim.Adam, lr=1e-3, eps=1e-4)
    )
    assert report_of(safe, levels=["O3"]).levels["O3"].fits


def test_the_head_that_learns_nothing_is_named() -> None:
    plan = report_of(CASES["unequal heads"], levels=["O2"]).levels["O2"]
    assert plan.problems[-1].kind == "underflow"
    assert plan.problems[-1].name.startswith("heads.1.")
    assert plan.verification is not None
    assert all(name.startswith("heads.1.") for name in plan.verification.frozen)


def test_a_bias_before_a_norm_is_rounding_error() -> None:
    assert find_noise(task_of(CASES["bias before a norm"])) == {"0.bias"}


def test_a_loss_with_random_numbers_of_its_own_makes_no_noise() -> None:
    random = torch.Generator().manual_seed(0)

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) * torch.randn(6, generator=random)).sum()

    model = nn.Linear(4, 6)
    task = Task(model, torch.optim.SGD(model.parameters()), loss_fn, torch.ones(2, 4))
    assert find_noise(task) == frozenset()


def test_a_small_head_is_no_rounding_error() -> None:
    assert not find_noise(task_of(CASES["unequal heads"]))


def test_tiny_elements_that_adam_moves_count_and_those_that_sgd_moves_do_not() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight).sum()

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float()

    shares = {}
    batch = torch.tensor([1.0] * 5 + [1e-12] * 5)
    for kind in (partial(torch.optim.Adam, eps=1e-30), torch.optim.SGD):
        model = Uneven()
        report = preamp.plan(
            model, loss_fn, batch, kind(model.parameters(), lr=1e-3),
            levels=["O2"], verify_steps=0,
        )  # fmt: skip
        tensors = {t.name: t for t in report.levels["O2"].tensors if t.what == "gradient"}
        shares[kind] = tensors["weight"].lost_share
    assert list(shares.values()) == [0.5, 0.0]


def test_gradients_of_a_sparse_embedding_are_seen() -> None:
    report = report_of(CASES["SparseAdam"], levels=["O1", "O4"], verify_steps=2)
    assert all(plan.fits for plan in report.levels.values())
    assert report_of(CASES["sparse embedding"], levels=["O3"]).levels["O3"].fits


def plan_of(level: str, moved: int, **changes: Any) -> LevelPlan:
    half = "float16" if level in ("O1", "O2", "O3") else "bfloat16"
    return LevelPlan(
        level=level, half=half, loss_scale=1.0, problems=(), is_tight=False, tensors=(),
        memory=preamp.estimate(1.0, level), moved_by_passes=0, moved_by_step=moved, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("least", [990, 1000, 1049, 1075, 1100, 1210])
@pytest.mark.parametrize("factor", [1.0, 1.018, 1.09])
def test_a_small_difference_in_bytes_never_outweighs_digits(least: int, factor: float) -> None:
    levels = {"O5": plan_of("O5", least), "O2": plan_of("O2", int(least * factor))}
    assert candidates(levels) == ["O2", "O5"]
    assert candidates({**levels, "O2": plan_of("O2", int(least * 1.2))}) == ["O5", "O2"]


def trained(losses: list[float], moved: float = 1.0, skipped: tuple[int, ...] = ()) -> Trained:
    return Trained(
        losses=tuple(losses),
        skipped=skipped,
        moved={"w": torch.full((4,), moved)},
        is_finite=True,
        has_squares=False,
        has_half_squares=False,
    )


FALLING = [1.0, 0.8, 0.6, 0.4]


@pytest.mark.parametrize(
    ("losses", "holds", "is_near"),
    [
        (FALLING, True, False),
        ([1.0, 0.87, 0.66, 0.4], True, True),
        ([1.0, 0.9, 0.8, 0.7], False, False),
        ([1.0, 0.8, math.nan, math.nan], False, False),
        ([1.0, 0.5, 0.2, 0.1], True, True),
    ],
)
def test_losses_that_fall_as_far_hold(losses: list[float], holds: bool, is_near: bool) -> None:
    found = compare(trained(losses), trained(FALLING))
    assert (found.holds, found.is_near) == (holds, is_near)


@pytest.mark.parametrize(("away", "holds"), [(0.04, True), (0.073, True), (0.11, False)])
def test_losses_that_hardly_fall_are_compared_by_their_distance(away: float, holds: bool) -> None:
    found = compare(trained([1.0 + away] * 4), trained([1.0, 1.0, 1.0, 1.0]))
    assert found.sunk is None
    assert found.holds == holds
    assert found.is_near == (holds and away > 0.04)


def test_skipped_steps_are_a_delay() -> None:
    found = compare(trained([1.0, 1.0, 1.0, 0.8], 0.5, (0, 1)), trained(FALLING))
    assert (found.sunk, found.frozen, found.skipped) == (1.0, (), 2)
    assert found.holds
    assert not compare(trained([1.0] * 4, 0.0, (0, 1, 2, 3)), trained(FALLING)).holds


@pytest.mark.parametrize(
    ("name", "fits"), [("Huber", False), ("hinge", False), ("saturated", True)]
)
def test_a_stall_that_has_begun_grows_where_updates_shrink(name: str, fits: bool) -> None:
    """SGD's updates become smaller with the gradients, Adam's do not."""
    plan = report_of(CASES[name], levels=[PURE_BFLOAT16]).levels[PURE_BFLOAT16]
    assert plan.fits == fits
    assert plan.verification is not None
    assert 0.7 < plan.verification.followed < 0.9
    assert fits or (plan.problems[-1].kind, plan.problems[-1].was_tried) == ("stall", True)


@pytest.mark.parametrize(("moved", "frozen"), [(0.0, ("w",)), (0.4, ("w",)), (0.6, ())])
def test_a_parameter_that_stays_behind_is_frozen(moved: float, frozen: tuple[str, ...]) -> None:
    assert compare(trained(FALLING, moved), trained(FALLING)).frozen == frozen
    assert compare(trained(FALLING, moved), trained(FALLING), {"w"}).frozen == ()


class Harmless(nn.Module):
    """Overflows in float16 where the infinity does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid((x.detach() * 0 + 1000) * 1000)
        return self.net(x) * gate


def test_an_overflow_without_effect_is_no_misfit_but_is_told() -> None:
    training = Training(Harmless, square, pairs, partial(torch.optim.SGD, lr=0.1))
    forecast = report_of(training, levels=["O2"], verify_steps=0).levels["O2"]
    assert forecast.problems[0].kind == "overflow"
    report = report_of(training, levels=["O2"])
    assert report.levels["O2"].fits
    assert report.levels["O2"].is_tight
    assert report.levels["O2"].rests_on == "8 steps"
    assert "O2 fits with little room:\n- Forecast, but without effect in 8 steps:" in str(report)


def test_a_buffer_that_overflows_unused_rests_on_the_forecast() -> None:
    plan = report_of(CASES["variance of large inputs"], levels=["O3"]).levels["O3"]
    assert plan.verification is not None
    assert plan.verification.holds
    assert "running_var" in plan.problems[0].name
    assert plan.rests_on == "a forecast"


def test_what_a_verdict_rests_on_is_in_text_and_json() -> None:
    report = report_of(CASES["sparse embedding"], levels=["O1", "O2"], verify_steps=3)
    assert {n: plan.rests_on for n, plan in report.levels.items()} == {
        "O1": "3 steps",
        "O2": "an error",
    }
    assert report.to_json()["levels"]["O1"]["rests_on"] == "3 steps"
    assert "O1     yes   3 steps " in str(report)


def test_the_page_shows_every_level_that_was_trained() -> None:
    pytest.importorskip("jinja2")
    page = render(report_of(CASES["Adam's eps"], levels=["O2", "O3"], verify_steps=3))
    assert "Take O2 with loss scale" in page
    chart = page.partition("Loss by step, all runs")[2]
    for name in ("O0", "O2", "O3"):
        assert f"<bdi>{name}</bdi>" in chart
    assert "eps of 1e-08 is zero in float16" in page
    assert "No level was trained" in render(
        report_of(CASES["Adam's eps"], levels=["O2"], verify_steps=0)
    )
