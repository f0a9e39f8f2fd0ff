# SPDX-License-Identifier: BSD-3-Clause
"""The FusedAdam of early 2019: how it is selected, and the arguments of its step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cases.fused import EARLY_ADAM, Oracle, assert_close, gradients, parameters
from cases.tolerances import assert_same
from kit.refusals import assert_refused
from preamp.optimizers import FusedAdam

SHAPES = ((6,), (4,))


def flat_groups() -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    """float32 parameters and their half copies, as the flat FP16_Optimizer keeps them."""
    halves = parameters(SHAPES, torch.float16)
    return [nn.Parameter(half.detach().float()) for half in halves], [h.detach() for h in halves]


@pytest.mark.parametrize("scale", [1.0, 1024.0, torch.tensor(1024.0)])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 100.0])
@pytest.mark.parametrize("tensor_norms", [False, True])
def test_a_flat_optimizer_drives_it(scale: Any, max_grad_norm: float, tensor_norms: bool) -> None:
    """Scaled half gradients in, rounded half parameters out, each group clipped by itself."""
    masters, halves = flat_groups()
    options = {"lr": 0.05, "max_grad_norm": max_grad_norm, "weight_decay": 0.1}
    groups: list[Any] = [([masters[0]], {}), ([masters[1]], {"lr": 0.01})]
    optimizer = FusedAdam([{"params": p, **o} for p, o in groups], **options)
    oracle = Oracle(EARLY_ADAM, groups, options, torch.float32)
    for step in range(3):
        plain = gradients(SHAPES, step, torch.float16)
        scaled = [grad * float(scale) for grad in plain]
        norms: list[Any] = [grad.float().norm() for grad in scaled]
        optimizer.step(
            grads=[[grad] for grad in scaled],
            output_params=[[half] for half in halves],
            scale=scale,
            grad_norms=norms if tensor_norms else [float(norm) for norm in norms],
        )
        oracle.step(plain)
    for master, half, exact in zip(masters, halves, oracle.values, strict=True):
        assert_close(master, exact, torch.float32, "master")
        assert_same(half, master.detach().half())
    assert [optimizer.state[master]["step"] for master in masters] == [3, 3]
    assert set(optimizer.state[masters[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "step" not in optimizer.param_groups[0]


@pytest.mark.parametrize("form", ["flat", "nested", "generator", "nested tuple"])
def test_forms_of_grads(form: str) -> None:
    masters, halves = flat_groups()
    grads, outputs = gradients(SHAPES, 0, torch.float16), halves
    shaped = {
        "flat": lambda x: list(x),
        "nested": lambda x: [list(x)],
        "generator": lambda x: (item for item in x),
        "nested tuple": lambda x: [tuple(x)],
    }[form]
    optimizer = FusedAdam(masters, lr=0.05)
    optimizer.step(grads=shaped(grads), output_params=shaped(outputs))
    again, _ = flat_groups()
    for param, grad in zip(again, grads, strict=True):
        param.grad = grad.float()
    other = FusedAdam(again, lr=0.05, max_grad_norm=0.0)
    other.step()
    for a, b, half in zip(masters, again, halves, strict=True):
        assert_same(a.detach(), b.detach())
        assert_same(half, a.detach().half())


def test_a_missing_gradient_is_the_parameters_own_or_none() -> None:
    masters, _ = flat_groups()
    before = [master.detach().clone() for master in masters]
    masters[0].grad = torch.ones(6)
    optimizer = FusedAdam(masters, lr=0.05)
    optimizer.step(grads=[None, None])
    assert not torch.equal(masters[0], before[0])
    assert torch.equal(masters[1], before[1])
    assert masters[1] not in optimizer.state


def test_without_norms_they_are_taken_here() -> None:
    results = []
    for norms in (None, [5.0]):
        param = nn.Parameter(torch.zeros(2))
        optimizer = FusedAdam([param], max_grad_norm=1.0, betas=(0.0, 0.5), eps=1.0)
        optimizer.step(grads=[torch.tensor([3.0, 4.0])], grad_norms=norms)
        results.append(param.detach())
    assert torch.allclose(*results, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("options", "is_early"),
    [
        ({}, False),
        ({"adam_w_mode": False}, False),
        ({"eps_inside_sqrt": False}, True),
        ({"max_grad_norm": 1.0}, True),
        ({"use_mt": True}, True),
        ({"amp_scale_adjustment": 1.0}, True),
    ],
)
def test_old_keywords_select_it(options: dict[str, Any], is_early: bool) -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = FusedAdam([param], **options)
    optimizer.step()
    (group,) = optimizer.param_groups
    assert ("step" in optimizer.state[param]) == is_early
    assert ("step" in group) == (not is_early)
    assert ("max_grad_norm" in group) == is_early


# -- refusals --------------------------------------------------------------------------------


def one(**options: Any) -> FusedAdam:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return FusedAdam([param], **options)


def stepped(**arguments: Any) -> FusedAdam:
    optimizer = one()
    optimizer.step(**arguments)
    return optimizer


def loaded_from_torch() -> FusedAdam:
    theirs, ours = torch.optim.AdamW([nn.Parameter(torch.ones(2))]), one()
    theirs.param_groups[0]["params"][0].grad = torch.ones(2)
    theirs.step()
    ours.load_state_dict(theirs.state_dict())
    return ours


def flat(**options: Any) -> FusedAdam:
    return FusedAdam(flat_groups()[0], **options)


Step = tuple[Callable[[], FusedAdam], dict[str, Any]]
GRADS = [torch.ones(6), torch.ones(4)]
SHORT = [torch.ones(6), torch.ones(1)]  # the last would broadcast
REFUSED_STEPS: dict[str, Step] = {
    "output_params without grads": (one, {"output_params": 2.0}),
    "scale without grads": (one, {"scale": 2.0}),
    "grad_norms without grads": (one, {"grad_norms": 2.0}),
    "early after today's steps": (stepped, {"grads": [torch.ones(2)]}),
    "today's after early steps": (lambda: stepped(grads=[torch.ones(2)]), {}),
    "a checkpoint of torch's Adam": (loaded_from_torch, {}),
    "grads while capturable": (lambda: one(capturable=True), {"grads": [torch.ones(2)]}),
    "no grads for two": (flat, {"grads": []}),
    "one gradient for two": (flat, {"grads": [torch.ones(6)]}),
    "empty groups of grads": (flat, {"grads": [[], []]}),
    "grads of another shape": (flat, {"grads": SHORT}),
    "output_params of another shape": (flat, {"grads": GRADS, "output_params": SHORT}),
    "two norms for a group": (
        lambda: flat(max_grad_norm=1.0),
        {"grads": GRADS, "grad_norms": [1.0, 2.0]},
    ),
    "sparse grads": (flat, {"grads": [GRADS[0], GRADS[1].to_sparse()]}),
}


@pytest.mark.parametrize("name", REFUSED_STEPS)
def test_refused_steps(name: str) -> None:
    make, arguments = REFUSED_STEPS[name]
    optimizer = make()
    params = nn.ParameterList(optimizer.param_groups[0]["params"])
    assert_refused("optim", name, lambda: optimizer.step(**arguments), optimizer, params)


REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "early with L2 decay": {"max_grad_norm": 1.0, "adam_w_mode": False},
    "early and capturable": {"max_grad_norm": 1.0, "capturable": True},
    "early with masters": {"max_grad_norm": 1.0, "capturable": True, "master_weights": True},
    "an adjustment of the scale": {"amp_scale_adjustment": 2.0},
}


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_refused_options(name: str) -> None:
    assert_refused("optim", name, lambda: one(**REFUSED_OPTIONS[name]))
