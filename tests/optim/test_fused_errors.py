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


@pytest.mark.apex("7.0 amsgrad=True: RuntimeError")
@pytest.mark.parametrize(
    "name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedMixedPrecisionLamb"]
)
def test_amsgrad(name: str) -> None:
    message = (
        f"{name} got amsgrad=True. It has no AMSGrad variant. Leave amsgrad out, or use "
        "torch.optim.AdamW(..., amsgrad=True)."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        getattr(optimizers, name)([param()], amsgrad=True)


ALL_NUMBERS = ("lr", "eps", "weight_decay", "momentum", "trust_coefficient", "max_grad_norm")
NUMBERS = {
    case.name: [name for name in ALL_NUMBERS if name in {**case.defaults, **case.needs}]
    for case in (*FUSED, EARLY_ADAM)
}
NUMBERS["FusedMixedPrecisionLamb"].append("step")


@pytest.mark.apex("7.0 negative numbers: ValueError")
@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, numbers in NUMBERS.items() for n in numbers]
)
@pytest.mark.parametrize("value", [-1, -0.5, float("nan")])
def test_negative_numbers(name: str, number: str, value: float) -> None:
    needs = {"lr": 0.1} if name in ("FusedSGD", "FusedLARS") else {}
    message = f"{name} got {number}={value!r}. {number} must be zero or larger. Pass a number >="
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(optimizers, name)([param()], **{**needs, number: value})


@pytest.mark.parametrize(
    ("name", "number"), [(name, n) for name, numbers in NUMBERS.items() for n in numbers]
)
def test_what_is_no_number(name: str, number: str) -> None:
    """YAML reads ``1e-3``, without a point, as a string."""
    needs = {"lr": 0.1} if name in ("FusedSGD", "FusedLARS") else {}
    message = f"{name} got {number}='1e-3'. {number} must be a number. Pass a number >= 0."
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(optimizers, name)([param()], **{**needs, number: "1e-3"})


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


@pytest.mark.parametrize(
    "name", ["FusedAdam", "FusedLAMB", "FusedNovoGrad", "FusedMixedPrecisionLamb"]
)
@pytest.mark.parametrize("betas", [(0.9, 1.0), (-0.1, 0.9), (0.9,)])
def test_betas(name: str, betas: Any) -> None:
    message = f"{name} got betas={betas!r}. betas are two numbers, each at least 0 and below 1."
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(optimizers, name)([param()], betas=betas)


@pytest.mark.parametrize("name", ["FusedAdam", "FusedLion", "FusedADOPT"])
@pytest.mark.parametrize("betas", [0.9, ("0.9", "0.999"), None])
def test_betas_that_are_no_numbers(name: str, betas: Any) -> None:
    message = f"{name} got betas={betas!r}. betas are two numbers, each at least 0 and below 1."
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(optimizers, name)([param()], betas=betas)


@pytest.mark.apex("7.0 negative numbers: ValueError")
@pytest.mark.parametrize("name", ["FusedSGD", "FusedLARS"])
@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"momentum": 0.9, "dampening": 0.5}])
def test_nesterov_needs_momentum(name: str, options: dict[str, float]) -> None:
    groups = [{"params": [param()]}]
    message = f"{name} got nesterov=True with momentum={options['momentum']!r}, dampening="
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(optimizers, name)(groups, lr=0.1, nesterov=True, **options)
    assert groups[0].keys() == {"params"}  # the defaults of what was refused are not in it


@pytest.mark.parametrize("name", ["FusedSGD", "FusedLARS"])
def test_a_momentum_that_is_no_number(name: str) -> None:
    message = f"{name} got momentum='0.9'. momentum must be a number. Pass a number >= 0."
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(optimizers, name)([param()], lr=0.1, nesterov=True, momentum="0.9")


@pytest.mark.parametrize("name", ["FusedSGD", "FusedLARS"])
def test_a_learning_rate_is_required(name: str) -> None:
    kind = getattr(optimizers, name)
    with pytest.raises(ValueError, match="required optimization parameter lr"):
        kind([param()])
    (group,) = kind([{"params": [param()], "lr": 0.5}]).param_groups
    assert group["lr"] == 0.5


@pytest.mark.apex("7 FusedLARS")
@pytest.mark.parametrize(("name", "value"), [("dampening", 0.5), ("wd_after_momentum", True)])
def test_lars_refuses_what_its_formula_lacks(name: str, value: Any) -> None:
    message = (
        f"FusedLARS got {name}={value!r}. Its update rule has no {name}; Apex accepts and "
        f"ignores it. Leave {name} out."
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizers.FusedLARS([param()], lr=0.1, momentum=0.9, **{name: value})


@pytest.mark.apex("7.0 FusedAdam(master_weights=True)")
def test_masters_need_counters_on_the_device() -> None:
    message = (
        "FusedAdam got master_weights=True with capturable=False. It keeps master weights only "
        "if it is capturable. Pass capturable=True too"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        optimizers.FusedAdam([param()], master_weights=True)


@pytest.mark.apex("7.0 FusedNovoGrad(norm_type=…): RuntimeError for others than")
@pytest.mark.parametrize("norm_type", [1, 3, "2"])
def test_norm_type(norm_type: Any) -> None:
    message = f"FusedNovoGrad got norm_type={norm_type!r}. It knows 2, the L2 norm, and 0"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        optimizers.FusedNovoGrad([param()], norm_type=norm_type)


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


@pytest.mark.apex("7.0 sparse gradients: RuntimeError")
@every_class
def test_sparse_gradients(case: FusedCase) -> None:
    good, optimizer = two_groups(case, torch.eye(3).to_sparse())
    message = f"{case.name} got a sparse gradient of shape (3, 3). Its update rule is dense."
    with pytest.raises(RuntimeError, match=re.escape(message)):
        optimizer.step()
    assert torch.equal(good, torch.ones(3))
    assert not optimizer.state


@pytest.mark.apex("7.0 other dtypes")
@every_class
def test_complex_parameters(case: FusedCase) -> None:
    good, optimizer = two_groups(case, torch.ones(3, dtype=torch.complex64))
    message = (
        f"{case.name} got a complex64 tensor. It updates float16, bfloat16, float32, float64. "
        "Give this parameter to an optimizer of torch.optim."
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        optimizer.step()
    assert torch.equal(good, torch.ones(3))
    assert not any(int(group.get("step", 0)) for group in optimizer.param_groups)


@pytest.mark.apex("7 FusedAdagrad")
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
