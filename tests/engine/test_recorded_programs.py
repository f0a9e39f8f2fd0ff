# SPDX-License-Identifier: BSD-3-Clause
"""Whatever a script does between two steps, the records have the numbers of plain torch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import preamp
from cases.selection import examples
from preamp.numerics import NumericsRecord, StepRecord

LOSSES = 2


@dataclass(frozen=True)
class Backward:
    """Of one loss, of one model or both."""

    loss_id: int
    models: tuple[int, ...]
    seed: int


@dataclass(frozen=True)
class Call:
    """On one model or its optimizer."""

    name: Literal["step", "zero_grad", "zeros", "model.zero_grad", "by hand", "clip"]
    model: int


which = st.sampled_from([0, 1])
backwards = st.builds(
    Backward, st.integers(0, LOSSES - 1), st.sampled_from([(0,), (1,), (0, 1)]), st.integers(0, 9)
)
calls = st.builds(
    Call,
    st.sampled_from(["step", "step", "zero_grad", "zeros", "model.zero_grad", "by hand", "clip"]),
    which,
)
FIRST_STEP = Call("step", 0)
programs = st.lists(backwards | backwards | calls, min_size=4, max_size=16)


@dataclass
class Expected:
    """What plain torch has for the coming step of one optimizer."""

    losses: dict[int, float] = field(default_factory=dict[int, float])
    grads: dict[int, list[torch.Tensor]] = field(default_factory=dict[int, list[torch.Tensor]])
    norm: float | None = None


class Pair:
    """Two models with an engine, the same two without, and what the records should say."""

    def __init__(self, level: str, loss_scale: Any) -> None:
        torch.manual_seed(0)
        self.models = [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)) for _ in "ab"]
        self.plain = copy.deepcopy(self.models)
        self.optimizers, self.plain_optimizers = (
            [torch.optim.SGD(model.parameters(), lr=0.125) for model in models]
            for models in (self.models, self.plain)
        )
        preamp.initialize(
            self.models,
            self.optimizers,
            opt_level=level,
            loss_scale=loss_scale,
            num_losses=LOSSES,
            verbosity=0,
            numerics="light",
            numerics_every=1,
        )
        self.engine = preamp.engine_of(self.optimizers[0])
        for scaler in self.engine.scalers if loss_scale == "dynamic" else ():
            scaler.set_scale(256.0)  # at which nothing overflows
        self.engine.scaler(1).set_scale(128.0) if loss_scale == "dynamic" else None
        self.scales = [self.engine.loss_scale(loss_id) for loss_id in range(LOSSES)]
        self.coming = [Expected(), Expected()]
        self.steps: list[tuple[int, Expected]] = []

    def backward(self, action: Backward) -> None:
        x = torch.randn(2, 3, generator=torch.Generator().manual_seed(action.seed))
        ours, theirs = (
            torch.stack([models[index](x).square().mean() for index in action.models]).sum()
            for models in (self.models, self.plain)
        )
        optimizers = [self.optimizers[index] for index in action.models]
        params = [p for index in action.models for p in self.plain[index].parameters()]
        before = {p: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in params}
        theirs.backward()
        with preamp.scale_loss(ours, optimizers, loss_id=action.loss_id) as scaled:
            scaled.backward()
        for index in action.models:
            coming = self.coming[index]
            coming.losses[action.loss_id] = theirs.item()
            grads = [(p, p.grad) for p in self.plain[index].parameters()]
            coming.grads[action.loss_id] = [g - before[p] for p, g in grads if g is not None]
            coming.norm = None

    def call(self, action: Call) -> None:
        index = action.model
        model, plain = self.models[index], self.plain[index]
        if action.name == "clip":
            preamp.clip_grad_norm_(self.optimizers[index], 0.5).zero_()  # it is the script's own
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            self.coming[index].norm = norm.item()
            return
        if action.name == "step":
            self.optimizers[index].step()
            self.plain_optimizers[index].step()
            self.steps.append((index, self.coming[index]))
        of_model = action.name in ("model.zero_grad", "by hand")
        if action.name == "by hand":
            for param in (*model.parameters(), *plain.parameters()):
                param.grad = None
        else:
            owner = model if of_model else self.optimizers[index]
            for each in (owner, plain):
                each.zero_grad(set_to_none=action.name != "zeros")
        if not of_model or self.coming[index].losses:
            self.coming[index] = Expected()


@pytest.mark.parametrize(
    ("level", "loss_scale"),
    [
        ("O0", "dynamic"),
        ("O0", 256.0),
        ("O0", 1.0),
        ("O2", "dynamic"),
        ("O2", 256.0),
        ("O5", 256.0),
        ("O5", 1.0),
    ],
)
@settings(max_examples=examples(25), deadline=None)
@given(program=programs)
@example(program=[Backward(0, (0,), 0), Call("clip", 0), Backward(0, (0,), 1), FIRST_STEP])
@example(program=[Backward(1, (0,), 0), Call("clip", 0), Call("model.zero_grad", 0), FIRST_STEP])
@example(program=[Backward(0, (0, 1), 0), Call("zero_grad", 0), FIRST_STEP, Call("step", 1)])
def test_records_are_of_what_the_step_used(level: str, loss_scale: Any, program: list[Any]) -> None:
    pair = Pair(level, loss_scale)
    eps = 2.0**-20 if level == "O0" else 2.0**-5  # of sums of products in half precision
    near = partial(pytest.approx, rel=eps, abs=eps)
    for action in program:
        if isinstance(action, Backward):
            pair.backward(action)
        else:
            pair.call(action)
    steps, numerics = (pair.engine.history.of(StepRecord), pair.engine.history.of(NumericsRecord))
    assert [record.optimizer for record in steps] == [index for index, _ in pair.steps]
    for record, (index, expected) in zip(steps, pair.steps, strict=True):
        assert record.losses == near(expected.losses)
        assert record.scales == dict(enumerate(pair.scales))
        assert record.norm == (None if expected.norm is None else near(expected.norm))
        mine = [r for r in numerics if (r.step, r.optimizer) == (record.step, index)]
        # Zeros that were left in place of gradients may be measured too.
        measured = {r.loss_id: r.tensors for r in mine if any(t.max_abs for t in r.tensors)}
        assert measured.keys() == expected.grads.keys()
        if loss_scale == 1.0:
            continue  # they may add up in place, and the sum is measured
        for loss_id, grads in expected.grads.items():
            found = [tensor.max_abs / tensor.scale for tensor in measured[loss_id]]
            assert found == near([grad.abs().max().item() for grad in grads])
            found = [tensor.rms / tensor.scale for tensor in measured[loss_id]]
            assert found == near([grad.square().mean().sqrt().item() for grad in grads])
