# SPDX-License-Identifier: BSD-3-Clause
"""What the fused optimizers refuse, in which words, and that nothing has changed then."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from cases.fused import EARLY_ADAM, FUSED, MIXED_LAMB, FusedCase, variant_id
from preamp import optimizers

every_class = pytest.mark.parametrize("case", FUSED, ids=variant_id)


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

BELOW = "{2} must be zero or larger. Pass a number >="
NO_NUMBER = "{2} must be a number. Pass a number >= 0."
BETAS = "betas are two numbers, each at least 0 and below 1."
LARS = "Its update rule has no {2}; Apex accepts and ignores it. Leave {2} out."
AMSGRAD = (
    "It has no AMSGrad variant. Leave amsgrad out, or use torch.optim.AdamW(..., amsgrad=True)."
)

# The optimizer, an option and its value, the error, and what the message says after both.
Refused = tuple[str, str, Any, type[Exception], str]
REFUSED: list[Refused] = [
    *((name, "amsgrad", True, RuntimeError, AMSGRAD) for name in ADAMS),
    *(
        (name, number, value, ValueError, BELOW)
        for name, number in EACH_NUMBER
        for value in (-1, -0.5, float("nan"))
    ),
    # YAML reads 1e-3, without a point, as a string.
    *((name, number, "1e-3", TypeError, NO_NUMBER) for name, number in EACH_NUMBER),
    *(
        (name, "betas", betas, ValueError, BETAS)
        for name in ADAMS
        for betas in ((0.9, 1.0), (-0.1, 0.9), (0.9,))
    ),
    *(
        (name, "betas", betas, TypeError, BETAS)
        for name in ("FusedAdam", "FusedLion", "FusedADOPT")
        for betas in (0.9, ("0.9", "0.999"), None)
    ),
    ("FusedLARS", "dampening", 0.5, ValueError, LARS),
    ("FusedLARS", "wd_after_momentum", True, ValueError, LARS),
    *(
        ("FusedNovoGrad", "norm_type", given, RuntimeError, "It knows 2, the L2 norm, and 0")
        for given in (1, 3, "2")
    ),
]


@pytest.mark.parametrize(("name", "option", "value", "error", "text"), REFUSED)
def test_refused_options(
    name: str, option: str, value: Any, error: type[Exception], text: str
) -> None:
    needs = {"lr": 0.1} if name in WITH_MOMENTUM else {}
    message = f"{name} got {option}={value!r}. {text.format(name, value, option)}"
    with pytest.raises(error, match=re.escape(message)):
        getattr(optimizers, name)([param()], **{**needs, option: value})


GROUPS = [(name, option) for name in NUMBERS for option in (("lr", -1.0), ("weight_decay", "0"))]
GROUPS += [(name, ("betas", (0.9, 1.0))) for name in ("FusedAdam", "FusedMixedPrecisionLamb")]
GROUPS += [("FusedSGD", ("momentum", -0.5)), ("FusedNovoGrad", ("norm_type", 1))]


@pytest.mark.parametrize(("name", "option"), GROUPS)
def test_groups_are_checked_as_arguments_are(name: str, option: tuple[str, Any]) -> None:
    """A norm_type that NovoGrad does not know was taken for 2, and the rest failed in a step."""
    kind, group = getattr(optimizers, name), {"params": [param()], **dict([option])}
    refusals = (RuntimeError, TypeError, ValueError)
    with pytest.raises(refusals, match=f"^{name} got {option[0]}="):
        kind([group], lr=0.1)
    optimizer = kind([param()], lr=0.1)
    with pytest.raises(refusals, match=f"^{name} got {option[0]}="):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("name", WITH_MOMENTUM)
@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"momentum": 0.0}, ValueError, "nesterov=True with momentum=0.0, dampening="),
        (
            {"momentum": 0.9, "dampening": 0.5},
            ValueError,
            "nesterov=True with momentum=0.9, dampening=",
        ),
        ({"momentum": "0.9"}, TypeError, f"momentum='0.9'. {NO_NUMBER.format('', '', 'momentum')}"),
    ],
)
def test_nesterov_needs_momentum(
    name: str, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    groups = [{"params": [param()]}]
    with pytest.raises(error, match=re.escape(f"{name} got {text}")):
        getattr(optimizers, name)(groups, lr=0.1, nesterov=True, **options)
    assert groups[0].keys() == {"params"}  # the defaults of what was refused are not in it


@pytest.mark.parametrize("name", WITH_MOMENTUM)
def test_a_learning_rate_is_required(name: str) -> None:
    kind = getattr(optimizers, name)
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        kind([param()])
    (group,) = kind([{"params": [param()], "lr": 0.5}]).param_groups
    assert group["lr"] == 0.5


def test_masters_need_counters_on_the_device() -> None:
    message = (
        "FusedAdam got master_weights=True with capturable=False. It keeps master weights only "
        "if it is capturable. Pass capturable=True too"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        optimizers.FusedAdam([param()], master_weights=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_reduced_precision_is_half(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    message = (
        f"FusedMixedPrecisionLamb got reduced_precision_dtype={name}. It is torch.float16, "
        "torch.bfloat16 or None."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        MIXED_LAMB.kind([param()], reduced_precision_dtype=dtype)


def two_groups(case: FusedCase, bad: torch.Tensor) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """The first group is fine, so that only a check of all groups can leave it unchanged."""
    good, other = param(), nn.Parameter(bad.detach().clone().to_dense())
    good.grad = torch.ones(3)
    other.grad = bad
    options = {**case.needs, **case.variants[-1]}
    return good, case.kind([{"params": [good]}, {"params": [other]}], **options)


SPARSE = "a sparse gradient of shape (3, 3). Its update rule is dense."
COMPLEX = (
    "a complex64 tensor. It updates float16, bfloat16, float32, float64. Give this parameter to an "
    "optimizer of torch.optim."
)


@pytest.mark.parametrize(
    ("bad", "text"),
    [(torch.eye(3).to_sparse(), SPARSE), (torch.ones(3, dtype=torch.complex64), COMPLEX)],
    ids=["sparse", "complex"],
)
@every_class
def test_gradients_that_no_rule_takes(case: FusedCase, bad: torch.Tensor, text: str) -> None:
    good, optimizer = two_groups(case, bad)
    with pytest.raises(RuntimeError, match=re.escape(f"{case.name} got {text}")):
        optimizer.step()
    assert torch.equal(good, torch.ones(3))
    assert not optimizer.state
    assert not any(int(group.get("step", 0)) for group in optimizer.param_groups)


def test_adagrad_wants_one_device_per_group() -> None:
    params = [param(), nn.Parameter(torch.ones(3, device="meta"))]
    for tensor in params:
        tensor.grad = torch.ones_like(tensor)
    optimizer = optimizers.FusedAdagrad(params)
    message = (
        "FusedAdagrad got a group whose tensors are not on the same device: cpu, meta. All "
        "parameters of a group share a device. Make one group per device."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        optimizer.step()
    assert torch.equal(params[0], torch.ones(3))
