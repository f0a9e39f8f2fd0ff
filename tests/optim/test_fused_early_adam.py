# SPDX-License-Identifier: BSD-3-Clause
"""The FusedAdam of early 2019: how it is selected, and the arguments of its step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from cases.fused import EARLY_ADAM, Oracle, assert_close, gradients, parameters
from cases.tolerances import assert_same
from preamp.core.errors import PreampStateError
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


def test_parameters_count_their_own_steps() -> None:
    masters, _ = flat_groups()
    optimizer = FusedAdam(masters, lr=0.05)
    first, second = gradients(SHAPES, 0, torch.float32)
    optimizer.step(grads=[first, None])
    optimizer.step(grads=[first, second])
    alone, _ = flat_groups()
    FusedAdam(alone[1:], lr=0.05).step(grads=[second])
    assert_same(masters[1].detach(), alone[1].detach())
    assert [optimizer.state[master]["step"] for master in masters] == [2, 1]


def test_without_norms_they_are_taken_here() -> None:
    results = []
    for norms in (None, [5.0]):
        param = nn.Parameter(torch.zeros(2))
        optimizer = FusedAdam([param], max_grad_norm=1.0, betas=(0.0, 0.5), eps=1.0)
        optimizer.step(grads=[torch.tensor([3.0, 4.0])], grad_norms=norms)
        results.append(param.detach())
    assert torch.allclose(*results, rtol=1e-6, atol=0)


def test_without_bias_correction_both_formulas_agree() -> None:
    results = []
    for extra in ({}, {"max_grad_norm": 0.0}):
        params = parameters(SHAPES, torch.float64)
        optimizer = FusedAdam(params, bias_correction=False, weight_decay=0.1, lr=0.1, **extra)
        for step in range(3):
            for param, grad in zip(params, gradients(SHAPES, step, torch.float64), strict=True):
                param.grad = grad
            optimizer.step()
        results.append(params)
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-14)


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


def test_resuming_keeps_the_counts() -> None:
    masters, _ = flat_groups()
    optimizer = FusedAdam(masters, max_grad_norm=1.0)
    optimizer.step(grads=gradients(SHAPES, 0, torch.float32))
    again = [nn.Parameter(master.detach().clone()) for master in masters]
    resumed = FusedAdam(again, max_grad_norm=1.0)
    resumed.load_state_dict(optimizer.state_dict())
    assert [resumed.state[param]["step"] for param in again] == [1, 1]


# -- refusals --------------------------------------------------------------------------------


def stepped(**arguments: Any) -> FusedAdam:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = FusedAdam([param])
    optimizer.step(**arguments)
    return optimizer


@pytest.mark.parametrize("argument", ["output_params", "scale", "grad_norms"])
def test_without_grads_todays_formula_refuses(argument: str) -> None:
    message = (
        f"FusedAdam.step() got {argument}. Without grads they belong to the FusedAdam of early "
        "2019 alone. Leave them out, or select that one by FusedAdam(..., max_grad_norm=0.0)."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        stepped(**{argument: 2.0})


def test_formulas_do_not_mix() -> None:
    todays, early = stepped(), stepped(grads=[torch.ones(2)])
    with pytest.raises(PreampStateError, match="the formula of early 2019, but its state has the"):
        todays.step(grads=[torch.ones(2)])
    with pytest.raises(PreampStateError, match="the formula of today, but its state has the step"):
        early.step()
    assert todays.param_groups[0]["step"] == 1


def test_a_checkpoint_of_torch_is_not_taken_for_todays() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    theirs = torch.optim.AdamW([param])
    theirs.step()
    ours = FusedAdam([param])
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(PreampStateError, match=r"like torch\.optim\.Adam, for each parameter"):
        ours.step()


def test_capturable_takes_no_gradients() -> None:
    optimizer = FusedAdam([nn.Parameter(torch.ones(2))], capturable=True)
    with pytest.raises(RuntimeError, match=re.escape("got grads while capturable=True.")):
        optimizer.step(grads=[torch.ones(2)])


@pytest.mark.parametrize(
    "todays",
    [{"adam_w_mode": False}, {"capturable": True}, {"capturable": True, "master_weights": True}],
)
def test_options_of_both_generations_are_refused(todays: dict[str, Any]) -> None:
    name, value = next(iter(todays.items()))
    message = (
        "FusedAdam got max_grad_norm, which select the optimizer of early 2019, together with "
        f"{name}={value}."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedAdam([nn.Parameter(torch.ones(2))], max_grad_norm=1.0, **todays)


def test_an_adjustment_of_the_scale_is_refused() -> None:
    message = "FusedAdam got amp_scale_adjustment=2.0. Gradients reach the optimizer unscaled"
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedAdam([nn.Parameter(torch.ones(2))], amp_scale_adjustment=2.0)


@pytest.mark.parametrize(
    ("grads", "lengths"), [([], [0]), ([torch.ones(6)], [1]), ([[], []], [0, 0])]
)
def test_grads_that_do_not_match_are_refused(grads: Any, lengths: list[int]) -> None:
    masters, _ = flat_groups()
    before = [master.detach().clone() for master in masters]
    message = (
        f"FusedAdam.step() got grads of lengths {lengths}. The groups have [2] parameters. Pass "
        "grads as one list per group, or flat if there is a single group."
    )
    optimizer = FusedAdam(masters)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.step(grads=grads)
    for master, was in zip(masters, before, strict=True):
        assert torch.equal(master, was)


@pytest.mark.parametrize("name", ["grads", "output_params"])
def test_shapes_that_do_not_match_are_refused(name: str) -> None:
    masters, _ = flat_groups()
    tensors = [torch.ones(6), torch.ones(1)]  # the last would broadcast
    message = (
        f"FusedAdam.step() got a tensor of shape (1,) in {name}. Its parameter has the shape "
        f"(4,). Pass {name} in the order and shapes of the groups' parameters."
    )
    optimizer = FusedAdam(masters)
    arguments = {"grads": [torch.ones(6), torch.ones(4)], name: tensors}
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.step(**arguments)
    assert not optimizer.state


def test_norms_that_do_not_match_are_refused() -> None:
    masters, _ = flat_groups()
    optimizer = FusedAdam(masters, max_grad_norm=1.0)
    message = "FusedAdam.step() got grad_norms of length 2. There are 1 groups. Pass one norm per"
    grads = gradients(SHAPES, 0, torch.float32)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.step(grads=grads, grad_norms=[1.0, 2.0])
    assert not optimizer.state


def test_sparse_grads_are_refused_before_anything_changes() -> None:
    masters, _ = flat_groups()
    before = masters[0].detach().clone()
    optimizer = FusedAdam(masters)
    with pytest.raises(RuntimeError, match="FusedAdam got a sparse gradient"):
        optimizer.step(grads=[torch.ones(6), torch.ones(4).to_sparse()])
    assert torch.equal(masters[0], before)
    assert not optimizer.state
