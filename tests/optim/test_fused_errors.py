# SPDX-License-Identifier: BSD-3-Clause
"""What the fused optimizers refuse, in which words, and that nothing has changed then."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from cases.fused import EARLY_ADAM, FUSED, MIXED_LAMB, FusedCase, variant_id
from cases.rules import ROWS
from kit.refusals import assert_refused
from preamp import optimizers
from preamp.kernels import Update, backend
from preamp.optimizers import FusedAdam


def param(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype))


ADAMS = ("FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedMixedPrecisionLamb")
WITH_MOMENTUM = ("FusedSGD", "FusedLARS")
ALL_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "trust_coefficient", "max_grad_norm")
NUMBERS = {
    case.name: [name for name in ALL_NUMBERS if name in {**case.defaults, **case.needs}]
    for case in (*FUSED, EARLY_ADAM)
}
NUMBERS["FusedMixedPrecisionLamb"].append("step")
EACH_NUMBER = [(name, number) for name, numbers in NUMBERS.items() for number in numbers]

REFUSED: dict[str, list[tuple[str, str, Any]]] = {  # an optimizer, an option and its value
    "no AMSGrad": [(name, "amsgrad", True) for name in ADAMS],
    "below zero": [(*row, value) for row in EACH_NUMBER for value in (-1, -0.5, float("nan"))],
    # YAML reads 1e-3, without a point, as a string.
    "a text for a number": [(*row, "1e-3") for row in EACH_NUMBER],
    "betas out of range": [
        (name, "betas", betas) for name in ADAMS for betas in ((0.9, 1.0), (-0.1, 0.9), (0.9,))
    ],
    "betas that are no numbers": [
        (name, "betas", betas)
        for name in ("FusedAdam", "FusedLAMB")
        for betas in (0.9, ("0.9", "0.999"), None)
    ],
    "no such option in LARS": [
        ("FusedLARS", "dampening", 0.5),
        ("FusedLARS", "wd_after_momentum", True),
    ],
    "masters of Adam on the host": [("FusedAdam", "master_weights", True)],
    "an unknown norm": [("FusedNovoGrad", "norm_type", given) for given in (1, 3, "2")],
}
CASES = [(refusal, *row) for refusal, rows in REFUSED.items() for row in rows]
ONLY_ARGUMENTS = ("amsgrad", "step", "dampening", "wd_after_momentum", "master_weights")


@pytest.mark.parametrize(("refusal", "name", "option", "value"), CASES)
def test_refused_options(refusal: str, name: str, option: str, value: Any) -> None:
    """As arguments and in groups: a norm_type that NovoGrad does not know was taken for 2 there."""
    kind, given = getattr(optimizers, name), {option: value}
    words = {"kind": name, "option": option, "value": repr(value)}
    assert_refused("optim", refusal, lambda: kind([param()], **{"lr": 0.1, **given}), **words)
    if option not in ONLY_ARGUMENTS:
        group, optimizer = {"params": [param()], **given}, kind([param()], lr=0.1)
        assert_refused("optim", refusal, lambda: kind([group], lr=0.1), **words)
        assert_refused(
            "optim", refusal, lambda: optimizer.add_param_group(group), optimizer, **words
        )
        assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", WITH_MOMENTUM)
@pytest.mark.parametrize(
    ("refusal", "options"),
    [
        ("nesterov without momentum", {"momentum": 0.0}),
        ("nesterov with dampening", {"momentum": 0.9, "dampening": 0.5}),
        ("a text for a number", {"momentum": "0.9"}),
    ],
)
def test_nesterov_needs_momentum(refusal: str, name: str, options: dict[str, Any]) -> None:
    groups, kind = [{"params": [param()]}], getattr(optimizers, name)
    words = {"kind": name, "option": "momentum", "value": repr(options["momentum"])}
    assert_refused(
        "optim", refusal, lambda: kind(groups, lr=0.1, nesterov=True, **options), **words
    )
    assert groups[0].keys() == {"params"}  # the defaults of what was refused are not in it


@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_a_learning_rate_is_required(name: str) -> None:
    kind = getattr(optimizers, name)
    assert_refused("optim", "no learning rate", lambda: kind([param()]))
    (group,) = kind([{"params": [param()], "lr": 0.5}]).param_groups
    assert group["lr"] == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_reduced_precision_is_half(dtype: torch.dtype) -> None:
    assert_refused(
        "optim",
        "a wide reduced precision",
        lambda: MIXED_LAMB.kind([param()], reduced_precision_dtype=dtype),
        dtype=str(dtype).removeprefix("torch."),
    )


@pytest.mark.parametrize(
    ("refusal", "bad"),
    [
        ("a sparse gradient", torch.eye(3).to_sparse()),
        ("a complex gradient", torch.ones(3, dtype=torch.complex64)),
    ],
)
@pytest.mark.parametrize("case", FUSED, ids=variant_id)
def test_gradients_that_no_rule_takes(case: FusedCase, refusal: str, bad: torch.Tensor) -> None:
    """The first group is fine, so that only a check of all groups can leave it unchanged."""
    good, other = param(), nn.Parameter(bad.detach().clone().to_dense())
    good.grad, other.grad = torch.ones(3), bad
    options = {**case.needs, **case.variants[-1]}
    optimizer = case.kind([{"params": [good]}, {"params": [other]}], **options)
    assert_refused("optim", refusal, optimizer.step, optimizer, kind=case.name)
    assert torch.equal(good, torch.ones(3))
    assert not optimizer.state
    assert not any(int(group.get("step", 0)) for group in optimizer.param_groups)


def test_a_norm_type_that_is_none_of_its_options_is_let_through() -> None:
    """As by torch's optimizers: a script's own entry of a group."""
    optimizer = optimizers.FusedAdam([{"params": [param()], "norm_type": 1}])
    assert optimizer.param_groups[0]["norm_type"] == 1


def test_lists_of_unequal_length() -> None:
    lists = [[torch.ones(2)] * count for count in (4, 3, 4, 4)]
    adam = next(row.rule for row in ROWS if row.op == "adam_")
    assert_refused(
        "optim",
        "lists of unequal length",
        lambda: backend("reference").update_(*lists, rule=adam, update=Update(step=3)),
    )


def test_copies_are_no_groups() -> None:
    optimizer = optimizers.FusedAdam([param()], capturable=True, master_weights=True)
    assert not hasattr(optimizer, "param_groups_master")
    assert_refused("optim", "copies as groups", lambda: optimizer.param_groups_master)


# -- the FusedAdam of early 2019 -------------------------------------------------------------------


def one(**options: Any) -> FusedAdam:
    own = param()
    own.grad = torch.ones(3)
    return FusedAdam([own], **options)


EARLY = {"max_grad_norm": 0.0}
REFUSED_STEPS: dict[str, Any] = {
    "grads": [torch.ones(3)],
    "output_params": [torch.ones(3)],
    "scale": 2.0,
    "grad_norms": [2.0],
}


@pytest.mark.parametrize("name", REFUSED_STEPS)
@pytest.mark.parametrize("options", [{}, EARLY])
def test_refused_arguments_of_steps(name: str, options: dict[str, Any]) -> None:
    optimizer = one(**options)
    params = nn.ParameterList(optimizer.param_groups[0]["params"])
    act = partial(optimizer.step, **{name: REFUSED_STEPS[name]})
    assert_refused("optim", "arguments of early 2019", act, optimizer, params, given=name)


REFUSED_LOADS: dict[str, Any] = {
    "early after today's steps": lambda: (one(), one(**EARLY)),
    "today's after early steps": lambda: (one(**EARLY), one()),
    "a checkpoint of torch's Adam": lambda: (
        torch.optim.AdamW(one().param_groups[0]["params"]),
        one(),
    ),
}


@pytest.mark.parametrize("name", REFUSED_LOADS)
def test_states_of_other_counters(name: str) -> None:
    theirs, ours = REFUSED_LOADS[name]()
    params = nn.ParameterList(ours.param_groups[0]["params"])
    theirs.step()
    act = partial(ours.load_state_dict, theirs.state_dict())
    assert_refused("optim", name, act, ours, params)


EARLY_OPTIONS: dict[str, dict[str, Any]] = {
    "early with L2 decay": {"max_grad_norm": 1.0, "adam_w_mode": False},
    "early and capturable": {"max_grad_norm": 1.0, "capturable": True},
    "early with masters": {"max_grad_norm": 1.0, "capturable": True, "master_weights": True},
    "an adjustment of the scale": {"amp_scale_adjustment": 2.0},
}


@pytest.mark.parametrize("name", EARLY_OPTIONS)
def test_refused_options_of_early_2019(name: str) -> None:
    assert_refused("optim", name, lambda: one(**EARLY_OPTIONS[name]))
