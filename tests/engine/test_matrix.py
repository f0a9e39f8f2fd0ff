# SPDX-License-Identifier: BSD-3-Clause
"""Every level × optimizer × models × zeroing × accumulation × overflow equals plain torch.

Gradients are exact (see ``cases.models``), so plain torch on float32 copies of the weights, which
leaves out the steps where an overflow was injected, is an oracle to the bit. At O3 the weights
are half themselves and so are the oracle's.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, EXACT, LEVEL_NAMES, LEVELS
from cases.models import Damage, Exact, loss_of, values
from cases.optimizers import ADAM, ALL, MAIN, NO_ROW, OptimizerCase, clone_state
from cases.tolerances import assert_same
from kit.compare import halves_match
from kit.pair import Pair

STEPS = 4  # injections fall into the first three, so a clean step always follows

Zero = Callable[[nn.Module, torch.optim.Optimizer], None]


def _by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    for param in model.parameters():
        param.grad = None


ZERO: dict[str, Zero] = {
    "by_hand": _by_hand,
    "model": lambda model, _: model.zero_grad(),
    "model_zeros": lambda model, _: model.zero_grad(set_to_none=False),
    "optimizer": lambda _, optimizer: optimizer.zero_grad(),
    "optimizer_none": lambda _, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer_zeros": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
}
PLACES = ("first", "middle", "last")
TARGETS = ("linear.weight", "norm.weight")  # half and float32 at O2 and O5
INJECTIONS = (None, *itertools.product(PLACES, TARGETS, (math.inf, math.nan)))


@dataclass(frozen=True, kw_only=True)
class Case:
    level: str
    optimizer: OptimizerCase
    several: bool
    accumulate: int
    zero: str
    inject: tuple[str, str, float] | None
    hit_loss: int = 0

    @property
    def injected_backward(self) -> int | None:
        """Index among all backwards of the first three steps."""
        count = 3 * self.accumulate
        where = {"first": 0, "middle": count // 2, "last": count - 1}
        return None if self.inject is None else where[self.inject[0]]


def cases() -> list[Case]:
    """The product of all axes but zeroing, which takes turns so that all pairs occur."""
    blocks = itertools.product(LEVEL_NAMES, MAIN, (False, True), (1, 3))
    names = list(ZERO)
    found = []
    for block, (level, optimizer, several, accumulate) in enumerate(blocks):
        for number, inject in enumerate(INJECTIONS):
            zeros = names if inject is None else [names[(block + number) % len(names)]]
            found += [
                Case(
                    level=level,
                    optimizer=optimizer,
                    several=several,
                    accumulate=accumulate,
                    zero=zero,
                    inject=inject,
                    hit_loss=(block // 4 + number) % 2 if several else 0,
                )
                for zero in zeros
            ]
    return found


CASES = cases()


@dataclass
class Training:
    """Models, optimizers, and which of them each loss uses."""

    models: list[Exact]
    optimizers: list[torch.optim.Optimizer]
    losses: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def make(cls, case: Case) -> Training:
        models = [Exact(seed) for seed in range(2 if case.several else 1)]
        optimizers = [case.optimizer.build(model.parameters()) for model in models]
        return cls(models, optimizers, [(0,), (0, 1)] if case.several else [(0,)])

    def copy(self, row: OptimizerCase, dtype: torch.dtype) -> Training:
        models = [copy.deepcopy(model).to(dtype) for model in self.models]
        optimizers = [row.build(model.parameters()) for model in models]
        return Training(models, optimizers, self.losses)

    def loss(self, which: int, index: int) -> torch.Tensor:
        return loss_of([self.models[i] for i in self.losses[which]], index)

    def zero(self, how: str) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            ZERO[how](model, optimizer)


@preamp.disable_casts()  # at O1 and O4 the whole thread is cast, this included
def oracle_step(plain: Training, case: Case, step: int, skipped: set[int]) -> None:
    for index in range(step * case.accumulate, (step + 1) * case.accumulate):
        for which in range(len(plain.losses)):
            plain.loss(which, index).backward()
    for place, optimizer in enumerate(plain.optimizers):
        if place not in skipped:
            optimizer.step()
    plain.zero(case.zero)


def watched(optimizer: torch.optim.Optimizer) -> tuple[list[torch.Tensor], dict[str, Any]]:
    return values(optimizer), clone_state(optimizer)


def assert_unchanged(optimizer: torch.optim.Optimizer, before: Any) -> None:
    params, state = before
    for ours, was in zip(values(optimizer), params, strict=True):
        assert_same(ours, was, "skipped step")
    now = clone_state(optimizer)
    assert now.keys() == state.keys()
    for key, was in state.items():
        assert_same(now[key], was, f"skipped step, state {key}")


def run(case: Case) -> None:
    level = BY_NAME[case.level]
    training = Training.make(case)
    plain = training.copy(case.optimizer, torch.float32 if level.has_masters else level.weight)
    scale = "dynamic" if case.inject is not None else None  # static scales do not look
    preamp.initialize(
        training.models,
        training.optimizers,
        opt_level=case.level,
        num_losses=len(training.losses),
        loss_scale=scale,
        verbosity=0,
    )
    engine = preamp.engine_of(training.models[0])
    scales = [engine.loss_scale(i) for i in range(len(training.losses))]
    damage = None
    if case.inject is not None:
        _, target, value = case.inject
        damaged = training.models[training.losses[case.hit_loss][-1]]
        damage = Damage(damaged.get_parameter(target), value)

    applied = skips = 0
    for step in range(STEPS):
        skipped: set[int] = set()
        for index in range(step * case.accumulate, (step + 1) * case.accumulate):
            for which, members in enumerate(training.losses):
                hit = index == case.injected_backward and which == case.hit_loss
                if hit and damage is not None:
                    damage.armed = True
                    skipped.update(members)
                    scales[which] /= 2
                optimizers = [training.optimizers[i] for i in members]
                with preamp.scale_loss(training.loss(which, index), optimizers, which) as scaled:
                    scaled.backward()
        before = {place: watched(training.optimizers[place]) for place in skipped}
        for place, optimizer in enumerate(training.optimizers):
            optimizer.step()
            assert engine.last_step_skipped is (place in skipped)
            if place in skipped:
                assert_unchanged(optimizer, before[place])
        assert all(map(halves_match, training.models))
        training.zero(case.zero)
        oracle_step(plain, case, step, skipped)
        skips += len(skipped)
        applied += len(training.optimizers) - len(skipped)
        assert [engine.loss_scale(i) for i in range(len(scales))] == scales
        for ours, theirs in zip(training.optimizers, plain.optimizers, strict=True):
            for a, b in zip(values(ours), values(theirs), strict=True):
                assert_same(a, b, f"{case}, after step {step}")
    assert (engine.steps_applied, engine.steps_skipped) == (applied, skips)
    assert skips == (0 if case.inject is None else len(training.losses[case.hit_loss]))
    assert [cause.loss_id for cause in engine.overflow_causes] == [case.hit_loss] * skips
    for ours, theirs in zip(training.optimizers, plain.optimizers, strict=True):
        state, wanted = clone_state(ours), clone_state(theirs)
        assert state.keys() == wanted.keys()
        for key, value in wanted.items():
            assert_same(state[key], value, f"{case}, state {key}")
    engine.close()


@pytest.mark.each
@pytest.mark.parametrize("accumulate", [1, 3], ids=lambda n: f"every{n}")
@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("optimizer", MAIN, ids=lambda row: row.name)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_training_equals_plain_torch(
    level: str, optimizer: OptimizerCase, several: bool, accumulate: int
) -> None:
    group = (level, optimizer, several, accumulate)
    for case in CASES:
        if (case.level, case.optimizer, case.several, case.accumulate) == group:
            run(case)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_matrix_has_every_value_of_every_axis(level: str) -> None:
    mine = [case for case in CASES if case.level == level]
    assert {case.zero for case in mine} == set(ZERO)
    for inject in INJECTIONS:
        group = [case for case in mine if case.inject == inject]
        assert {case.zero for case in group} == set(ZERO)
        assert {case.optimizer.name for case in group} == {"sgd", "adam", "adamw"}
        assert {(case.several, case.accumulate) for case in group} == {
            (several, n) for several in (False, True) for n in (1, 3)
        }
    for target in TARGETS:
        hits = {c.hit_loss for c in mine if c.several and c.inject and c.inject[1] == target}
        assert hits == {0, 1}


def test_matrix_notices_a_wrong_oracle() -> None:
    case = Case(level="O2", optimizer=ADAM, several=False, accumulate=1, zero="model", inject=None)
    training = Training.make(case)
    wrong = training.copy(ADAM, torch.float32)
    with torch.no_grad():
        first = next(wrong.models[0].parameters())
        first.view(-1)[0] = torch.nextafter(first.view(-1)[0], torch.tensor(torch.inf))
    pairs = zip(values(training.models[0]), values(wrong.models[0]), strict=True)
    assert [torch.equal(a, b) for a, b in pairs] == [False, True, True, True]


def test_every_level_has_a_row() -> None:
    assert [row.name for row in LEVELS] == list(preamp.OPT_LEVELS)


def test_every_torch_optimizer_has_a_row() -> None:
    theirs = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert theirs <= {row.kind.__name__ for row in ALL} | set(NO_ROW)  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", ALL, ids=lambda row: row.name)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_any_torch_optimizer_trains_and_skips(level: str, optimizer: OptimizerCase) -> None:
    if level in optimizer.skips:
        pytest.skip(optimizer.skips[level])
    for inject in (None, ("middle", "linear.weight", math.inf)):
        run(
            Case(
                level=level,
                optimizer=optimizer,
                several=False,
                accumulate=1,
                zero="model",
                inject=inject,
            )
        )


@pytest.mark.parametrize(
    ("optimizer", "variant"),
    [(row, variant) for row in ALL for variant in row.variants],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_torch_variants_train_and_skip(level: str, optimizer: OptimizerCase, variant: str) -> None:
    row = OptimizerCase(
        name=optimizer.name, kind=optimizer.kind, options={**optimizer.options, variant: True}
    )
    if level in optimizer.skips:
        pytest.skip(optimizer.skips[level])
    run(
        Case(
            level=level,
            optimizer=row,
            several=True,
            accumulate=1,
            zero="model",
            inject=("middle", "linear.weight", math.nan),
            hit_loss=1,
        )
    )


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("level", EXACT)
def test_muon(level: str) -> None:
    pair = Pair(level, lambda params: torch.optim.Muon([p for p in params if p.dim() == 2]))
    for index in range(3):
        pair.train(index)
        pair.check(f"step {index}")


@pytest.mark.parametrize("level", ["O0", "O3", "O4", "O5"])
@pytest.mark.parametrize("scale", [1.0, 128.0])
def test_a_static_scale_applies_infinite_gradients(level: str, scale: float) -> None:
    model = Exact()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=scale, verbosity=0)
    damage = Damage(model.linear.weight, math.inf)
    damage.armed = True
    with preamp.scale_loss(loss_of([model], 0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    engine = preamp.engine_of(model)
    assert not engine.last_step_skipped
    assert engine.loss_scale() == scale
    assert model.linear.weight[-1, -1].item() == -math.inf
    assert torch.isfinite(model.linear.weight.view(-1)[:-1]).all()
