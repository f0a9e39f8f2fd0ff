# SPDX-License-Identifier: BSD-3-Clause
"""The FusedAdam of early 2019: how it is selected, and what belongs to it no longer."""

from typing import Any

import pytest
import torch
from torch import nn

from kit.refusals import assert_refused
from preamp.optimizers import FusedAdam


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


def test_a_nan_stays_where_it_is() -> None:
    """A clip by a norm that is nan clips nothing."""
    param = nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([param], lr=0.5, max_grad_norm=1.0)
    param.grad = torch.tensor([2.0, torch.nan, -2.0])
    optimizer.step()
    assert param.isnan().tolist() == [False, True, False]
    assert param[0] < 1.0 < param[2]


# -- refusals --------------------------------------------------------------------------------


def one(**options: Any) -> FusedAdam:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    return FusedAdam([param], **options)


def load_the_state_of(theirs: torch.optim.Optimizer, into: FusedAdam) -> None:
    theirs.step()
    into.load_state_dict(theirs.state_dict())


def torchs() -> torch.optim.Optimizer:
    return torch.optim.AdamW(one().param_groups[0]["params"])


EARLY = {"max_grad_norm": 0.0}
REFUSED_STEPS: dict[str, Any] = {
    "grads": [torch.ones(2)],
    "output_params": [torch.ones(2)],
    "scale": 2.0,
    "grad_norms": [2.0],
}


@pytest.mark.parametrize("name", REFUSED_STEPS)
@pytest.mark.parametrize("options", [{}, EARLY])
def test_refused_steps(name: str, options: dict[str, Any]) -> None:
    optimizer = one(**options)
    params = nn.ParameterList(optimizer.param_groups[0]["params"])
    act = lambda: optimizer.step(**{name: REFUSED_STEPS[name]})  # noqa: E731
    assert_refused("optim", "arguments of early 2019", act, optimizer, params, given=name)


REFUSED_LOADS: dict[str, Any] = {
    "early after today's steps": lambda: (one(), one(**EARLY)),
    "today's after early steps": lambda: (one(**EARLY), one()),
    "a checkpoint of torch's Adam": lambda: (torchs(), one()),
}


@pytest.mark.parametrize("name", REFUSED_LOADS)
def test_refused_states(name: str) -> None:
    theirs, ours = REFUSED_LOADS[name]()
    params = nn.ParameterList(ours.param_groups[0]["params"])
    assert_refused("optim", name, lambda: load_the_state_of(theirs, ours), ours, params)


REFUSED_OPTIONS: dict[str, dict[str, Any]] = {
    "early with L2 decay": {"max_grad_norm": 1.0, "adam_w_mode": False},
    "early and capturable": {"max_grad_norm": 1.0, "capturable": True},
    "early with masters": {"max_grad_norm": 1.0, "capturable": True, "master_weights": True},
    "an adjustment of the scale": {"amp_scale_adjustment": 2.0},
}


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_refused_options(name: str) -> None:
    assert_refused("optim", name, lambda: one(**REFUSED_OPTIONS[name]))
