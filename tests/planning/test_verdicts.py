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
from insight.plan_cases import CASES, DESCRIBED, GAMES, Training, mlp
from preamp.planning.isolation import Task
from preamp.planning.ranges import find_noise
from preamp.planning.recommend import candidates, is_slow_in_bfloat16, reasons_for
from preamp.planning.records import PURE_BFLOAT16, LevelPlan, PlanProblem, PlanReport, Verification
from preamp.planning.report import render
from preamp.planning.verify import Expected, Trained, compare

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
    problems = report_of(safe, levels=["O3"]).levels["O3"].problems
    assert all(problem.kind != "optimizer" for problem in problems)


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


def plan_of(level: str, *problems: PlanProblem) -> LevelPlan:
    half = "float16" if level in ("O1", "O2", "O3") else "bfloat16"
    return LevelPlan(
        level=level, half=half, loss_scale=1.0, problems=problems, is_tight=False, tensors=(),
        memory=preamp.estimate(1.0, level),
    )  # fmt: skip


def test_o5_comes_first_and_o2_where_bfloat16_is_slow() -> None:
    levels = {name: plan_of(name) for name in ("O1", "O2", "O3", "O4", "O5")}
    for is_slow, order in ((False, "O5 O2 O4 O1 O3"), (True, "O2 O5 O1 O4 O3")):
        assert candidates(levels, is_slow=is_slow) == order.split()
    misfit = plan_of("O5", PlanProblem(kind="losses", name="", text="Away."))
    without = {**levels, "O5": misfit}
    assert candidates(without) == ["O2", "O4", "O1", "O3"]
    assert reasons_for("O5", levels)[0] == "O5 is where to start, and it fits."
    assert reasons_for("O2", without)[0] == "O2, since O5 does not fit."
    assert reasons_for("O2", levels, is_slow=True)[0].startswith("O2, since products in bfloat16")
    assert reasons_for("O2", {"O2": levels["O2"]})[0].startswith("O2 is the first level in the")


@pytest.mark.parametrize(
    ("capability", "is_slow"), [((6, 1), False), ((7, 5), True), ((8, 0), False), ((9, 0), False)]
)
def test_gpus_with_units_for_float16_alone_are_slow_in_bfloat16(
    capability: tuple[int, int], is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.hip", None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: capability)
    assert is_slow_in_bfloat16(torch.device("cuda")) == is_slow


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


def compared(
    losses: list[float], *given: Any, float32: list[float] = FALLING, spread: float = 0.0
) -> Verification:
    return compare(trained(losses, *given), Expected(trained(float32), spread))


@pytest.mark.parametrize(
    ("losses", "holds"),
    [
        (FALLING, True),
        ([1.02, 0.83, 0.62, 0.38], True),  # 5% of 0.6, and twice a rounding of 1.0
        ([1.0, 0.87, 0.66, 0.4], False),
        ([1.0, 0.9, 0.8, 0.7], False),
        ([1.0, 0.8, math.nan, math.nan], False),
        ([1.0, 0.5, 0.2, 0.1], False),
        ([90.0, 60.0, 20.0, 2.0], False),  # it fell further than float32 ever can
        ([90.0, 0.8, 0.6, 0.4], False),
    ],
)
def test_losses_stay_near_in_every_quarter(losses: list[float], holds: bool) -> None:
    assert compared(losses).holds == holds


@pytest.mark.parametrize(
    ("away", "spread", "holds"),
    [
        (0.003, 0.0, True),  # a rounding to bfloat16
        (0.01, 0.0, False),
        (0.01, 0.006, True),
        (0.09, 1.0, True),
        (0.11, 1.0, False),  # float32's own spread counts up to a tenth of the largest loss
        (0.11, math.inf, False),
    ],
)
def test_losses_that_do_not_fall_are_near_as_float32_is_to_itself(
    away: float, spread: float, holds: bool
) -> None:
    assert compared([1.0 + away] * 4, float32=[1.0] * 4, spread=spread).holds == holds


def test_losses_that_scatter_are_compared_by_their_means() -> None:
    scatter = [0.1 * (-1) ** step for step in range(16)]
    losses = [1.0 + one for one in scatter]
    assert compared(losses, float32=[1.0 - one for one in scatter]).holds
    assert not compared([1.1 + one for one in scatter], float32=losses).holds


@pytest.mark.parametrize("last", [0.0, 1e-6, 0.02])
def test_a_loss_that_reaches_zero_is_near_by_what_was_gained(last: float) -> None:
    assert compared([1.0, 0.1, last, last], float32=[1.0, 0.1, 0.0, 0.0]).holds
    assert compared([0.0] * 4, float32=[0.0] * 4).holds


def test_what_is_near_is_a_fifth_of_the_largest_loss_at_most() -> None:
    for float32 in (FALLING, [3.0, -3.0], [1e-30, 0.0], [5.0]):
        for spread in (0.0, 1e-3, 1.0, 1e9, math.inf):
            found = compared(float32, float32=float32, spread=spread)
            assert found.holds
            assert found.allowed <= 0.2 * max(map(abs, float32))


def test_skipped_steps_are_a_delay() -> None:
    found = compared([1.0, 1.0, 1.0, 0.8], 0.5, (0, 1))
    assert (found.distance, found.frozen, found.skipped) == (0.0, (), 2)
    assert found.holds
    assert not compared([1.0] * 4, 0.0, (0, 1, 2, 3), float32=[1.0] * 4).holds


@pytest.mark.parametrize("steps", [8, 40])
@pytest.mark.parametrize(
    "name", ["cancelling variance, 30 away", "cancelling variance, wide floor"]
)
def test_a_loss_that_falls_from_far_above_float32s_is_no_training(name: str, steps: int) -> None:
    report = report_of(CASES[name], levels=["O2", "O5"], verify_steps=steps)
    assert report.recommended == "O0", str(report)
    assert {plan.problems[-1].kind for plan in report.levels.values()} == {"losses"}


@pytest.mark.parametrize("training", GAMES)
def test_adversaries_stay_near_though_no_loss_falls(training: str) -> None:
    report = report_of(GAMES[training], levels=["O2", "O5"], verify_steps=24)
    assert report.recommended == "O5", str(report)
    assert report.levels["O2"].fits, str(report)


HEALTHY = (
    "transformer, slow", "recurrent, slow", "rows drawn anew", "shaken inputs", "exactly zero",
    "slow AdamW", "bfloat16 weights stand still", "convolution, SGD",
)  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_are_told_to_take_o5(name: str) -> None:
    report = report_of(CASES[name], levels=["O5", "O2", PURE_BFLOAT16])
    assert report.recommended == "O5", str(report)
    assert report.levels["O2"].fits, str(report)
    if name in ("slow AdamW", "bfloat16 weights stand still"):
        assert "stall" in {problem.kind for problem in report.levels[PURE_BFLOAT16].problems}


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
    assert compared(FALLING, moved).frozen == frozen
    is_noise = Expected(trained(FALLING), 0.0, frozenset({"w"}))
    assert compare(trained(FALLING, moved), is_noise).frozen == ()


class Harmless(nn.Module):
    """Overflows in float16 where the infinity does no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = torch.sigmoid((x.detach() * 0 + 1000) * 1000)
        return self.net(x) * gate


def test_an_overflow_without_effect_is_no_misfit_but_is_told() -> None:
    training = Training(Harmless, partial(torch.optim.SGD, lr=0.1))
    forecast = report_of(training, levels=["O2"], verify_steps=0).levels["O2"]
    assert forecast.problems[0].kind == "overflow"
    report = report_of(training, levels=["O2"])
    assert report.levels["O2"].fits
    assert report.levels["O2"].is_tight
    assert report.levels["O2"].rests_on == "8 steps"
    assert "O2 fits with little room:\n- Forecast, but without effect in 8 steps:" in str(report)


def test_a_buffer_that_overflows_unused_rests_on_the_forecast() -> None:
    training = dataclasses.replace(
        CASES["variance of large inputs"], optimizer=partial(torch.optim.SGD, lr=0.03)
    )
    plan = report_of(training, levels=["O3"]).levels["O3"]
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
    assert "Take O2" in page
    chart = page.partition("Loss by step, all runs")[2]
    for name in ("O0", "O2", "O3"):
        assert f"<bdi>{name}</bdi>" in chart
    assert "eps of 1e-08 is zero in float16" in page
    assert "No level was trained" in render(
        report_of(CASES["Adam's eps"], levels=["O2"], verify_steps=0)
    )
