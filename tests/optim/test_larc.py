# SPDX-License-Identifier: BSD-3-Clause
"""LARC: the formula against float64, its optimizer's surface, and every opt level."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from cases.models import Exact, loss_of
from cases.optimizers import clone_state
from cases.selection import examples
from cases.tolerances import assert_same, assert_within_budget
from kit.pair import Pair
from kit.refusals import assert_refused
from preamp.optimizers import FusedSGD
from preamp.parallel.LARC import LARC


def adapted(
    p: torch.Tensor, g: torch.Tensor, *, lr: float, wd: float, tc: float, clip: bool, eps: float
) -> torch.Tensor:
    """The formula, in float64."""
    p, g = p.double(), g.double()
    p_norm, g_norm = p.norm(), g.norm()
    if p_norm == 0 or g_norm == 0:
        return g
    a = tc * p_norm / (g_norm + wd * p_norm + eps)
    if clip:
        a = min(a / lr, 1.0)
    return (g + wd * p) * a


def one_step(p: torch.Tensor, g: torch.Tensor, lr: float, wd: float, **larc: Any) -> torch.Tensor:
    """What LARC makes of the gradient ``g`` of ``p``."""
    param = nn.Parameter(p.clone())
    param.grad = g.clone()
    LARC(torch.optim.SGD([param], lr=lr, weight_decay=wd), **larc).step()
    return param.grad


@settings(max_examples=examples(50))
@given(
    seed=st.integers(0, 1000),
    sizes=st.tuples(st.sampled_from([1e-4, 1.0, 1e4]), st.sampled_from([1e-4, 1.0, 1e4])),
    group=st.tuples(st.sampled_from([1e-3, 0.1, 10.0]), st.sampled_from([0.0, 0.01, 1.0])),
    tc=st.sampled_from([0.001, 0.02, 1.0]),
    clip=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_formula(seed: int, sizes: Any, group: Any, tc: float, clip: bool, dtype: Any) -> None:
    lr, wd = group
    generator = torch.Generator().manual_seed(seed)
    p, g = ((torch.randn(7, generator=generator) * size).to(dtype) for size in sizes)
    facts = {"tc": tc, "clip": clip, "eps": 1e-6}
    exact = adapted(p, g, lr=lr, wd=wd, **facts)
    ours = one_step(p, g, lr, wd, trust_coefficient=tc, clip=clip, eps=1e-6)
    assert ours.dtype is dtype
    assert_within_budget(ours, exact.to(dtype), exact)


@pytest.mark.parametrize("zero", ["weights", "gradient"])
def test_where_a_norm_is_zero_nothing_changes(zero: str) -> None:
    p, g = torch.ones(3) * (zero != "weights"), torch.ones(3) * (zero != "gradient")
    assert_same(one_step(p, g, 0.1, 0.5), g)


@pytest.mark.parametrize("kind", ["Rprop", "Adafactor", "AdamW"])
def test_around_other_optimizers(kind: str) -> None:
    param = nn.Parameter(torch.ones(3))
    larc = LARC(getattr(torch.optim, kind)([param], lr=0.1))
    decays = [dict(group) for group in larc.param_groups]
    param.grad = torch.ones(3)
    larc.step()
    assert [dict(group).keys() for group in larc.param_groups] == [d.keys() for d in decays]
    assert larc.param_groups[0].get("weight_decay") == decays[0].get("weight_decay")
    assert not torch.equal(param, torch.ones(3))


def test_an_optimizer_whose_hooks_run_twice_is_adapted_once() -> None:
    class Twice(FusedSGD):  # hooks run in both of its steps
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    params = [nn.Parameter(torch.tensor(1.0)) for _ in range(2)]
    for param, kind in zip(params, (FusedSGD, Twice), strict=True):
        param.grad = torch.tensor(1.0)
        LARC(kind([param], lr=torch.tensor([0.1]), weight_decay=0.1)).step()  # as a number is
    assert_same(*(param.detach() for param in params))


def test_weight_decay_comes_back_when_the_step_raises() -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise MemoryError(f"with weight decay {self.param_groups[0]['weight_decay']}")

    param = nn.Parameter(torch.ones(1))
    larc = LARC(Fails([param], lr=0.1, weight_decay=0.25))
    param.grad = torch.ones(1)
    with pytest.raises(MemoryError, match=r"with weight decay 0\.0"):
        larc.step()
    assert larc.param_groups[0]["weight_decay"] == 0.25
    grad = param.grad.clone()
    with pytest.raises(MemoryError, match=r"with weight decay 0\.25"):  # LARC's hook is gone
        larc.optim.step()
    assert_same(param.grad, grad)


def test_sparse_gradients_are_refused() -> None:
    dense, embedding = nn.Parameter(torch.ones(2)), nn.Embedding(4, 2, sparse=True)
    dense.grad = torch.ones(2)
    embedding(torch.tensor([1])).sum().backward()
    larc = LARC(torch.optim.SGD([dense, *embedding.parameters()], lr=0.1, weight_decay=0.1))
    assert_refused("optim", "a sparse gradient in LARC", larc.step, larc.optim)
    assert (dense.tolist(), dense.grad.tolist()) == ([1.0, 1.0], [1.0, 1.0])


REFUSED: dict[str, Callable[[], object]] = {
    "LARC of parameters": lambda: LARC([nn.Parameter(torch.ones(1))]),  # type: ignore[arg-type]
    "LARC and its optimizer": lambda: preamp.initialize(
        (model := Exact()), [(larc := build(model.parameters())), larc.optim], opt_level="O2"
    ),
    "LARC that was not initialized": lambda: preamp.scale_loss(
        loss_of([Exact()], 0), build(Exact().parameters())
    ).__enter__(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert_refused("optim", name, REFUSED[name])


# -- the surface of an optimizer ---------------------------------------------------------------


def test_everything_else_is_the_optimizers() -> None:
    found = inspect.signature(LARC).parameters
    defaults = {"trust_coefficient": 0.02, "clip": True, "eps": 1e-8}
    assert {name: p.default for name, p in list(found.items())[1:]} == defaults
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    larc = LARC(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    larc.step()
    assert larc.optim is optimizer
    assert larc.state is optimizer.state
    assert larc.param_groups is optimizer.param_groups
    assert repr(larc) == repr(optimizer)
    state = copy.deepcopy(larc.state_dict())
    other = LARC(torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9))
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.1
    assert clone_state(other.optim).keys() == clone_state(optimizer).keys()
    larc.zero_grad()
    assert model.weight.grad is None
    larc.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert len(optimizer.param_groups) == 2
    larc.param_groups = optimizer.param_groups[:1]
    assert len(optimizer.param_groups) == 1


def test_zero_grad_does_what_the_wrapped_optimizer_does() -> None:
    """FusedSGD fills gradients with zeros by default, as scripts that flatten them rely on."""
    weight = nn.Parameter(torch.ones(2))
    larc = LARC(FusedSGD([weight], lr=0.1))
    weight.grad = torch.ones(2)
    larc.zero_grad()
    assert weight.grad is not None
    assert not weight.grad.any()
    larc.zero_grad(set_to_none=True)
    assert weight.grad is None


# -- mixed precision ---------------------------------------------------------------------------


def build(params: Any) -> LARC:
    return LARC(torch.optim.SGD(params, lr=0.5, momentum=0.9, weight_decay=0.125))


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize(
    "form", [lambda x: x, lambda x: [x], lambda x: (x,)], ids=["alone", "list", "tuple"]
)
def test_training_equals_larc_on_masters(level: str, form: Any) -> None:
    """As without preamp, on weights of the optimizer's dtype; also across a skipped step."""
    looks = level != "O3"
    both = Pair(level, build, loss_scale="dynamic" if looks else 1024.0)
    sides: Any = both.optimizer, both.plain_optimizer
    schedules = [torch.optim.lr_scheduler.StepLR(larc.optim, 1, gamma=0.5) for larc in sides]
    larc, engine = sides[0], both.engine
    assert preamp.engine_of(larc) is engine is preamp.engine_of(larc.optim)
    assert engine.optimizers[0] is larc.optim
    for index in range(3):
        with preamp.scale_loss(both.loss(index), form(larc)) as scaled:
            scaled.backward()
        both.theirs(index)
        grads = [param.grad for param in preamp.master_params(larc)]
        norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        assert torch.allclose(preamp.clip_grad_norm_(larc, 1e9), norm)
        both.step()
        for schedule in schedules:
            schedule.step()
        both.check(f"step {index}")
        both.zero()
        if looks and index == 0:
            both.overflow()
            grads = [None if p.grad is None else p.grad.clone() for p in both.model.parameters()]
            larc.step()
            assert (engine.steps_skipped, engine.last_step_skipped) == (1, True)
            assert larc.param_groups[0]["weight_decay"] == 0.125
            both.check("skipped")
            for param, grad in zip(both.model.parameters(), grads, strict=True):
                assert_same(param.grad, grad)
            larc.zero_grad()
    assert engine.steps_applied == 3
    assert engine.state_dict() == preamp.engine_of(larc.optim).state_dict()
