# SPDX-License-Identifier: BSD-3-Clause
"""A new optimizer, op or option of a rule is missed by name in every table that tests run over."""

from enum import Enum
from typing import Any

import pytest
import torch
from torch import nn

from cases import fused
from cases.optimizers import ALL
from cases.rules import ORACLES, ROWS
from distributed.sharded_params_checks import BITWISE, WITH_NORMS
from kit.refusals import assert_refused
from kit.saved import FUSED as IN_CHECKPOINTS
from preamp import optimizers
from preamp.compat.flat.refusals import check_elementwise
from preamp.kernels.rules import RULES

PUBLIC = [name for name in vars(optimizers) if name.startswith("Fused")]


def params() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.arange(1.0, 7.0))]


def kinds(*tables: dict[str, Any]) -> set[str]:
    return {type(make(params())).__name__ for table in tables for make in table.values()}


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_optimizer_is_in_every_table(name: str) -> None:
    assert name in {case.name for case in fused.FUSED}
    assert name in IN_CHECKPOINTS
    is_elementwise = getattr(optimizers, name).is_elementwise
    assert (name in kinds(BITWISE)) == is_elementwise
    assert (name in kinds(WITH_NORMS)) >= (not is_elementwise)


@pytest.mark.parametrize("kind_of_rule", RULES)
def test_every_rule_has_an_oracle_and_rows_for_its_options(kind_of_rule: type) -> None:
    rows = [row for row in ROWS if type(row.rule) is kind_of_rule]
    (op,) = {row.op for row in rows}
    assert op in ORACLES
    rules = [row.rule for row in rows]
    for field in kind_of_rule.__slots__:
        seen = {getattr(rule, field) for rule in rules}
        kind = type(next(iter(seen)))
        if issubclass(kind, (bool, Enum)):
            assert seen == set(kind if issubclass(kind, Enum) else (False, True)), field


@pytest.mark.parametrize("case", [*fused.FUSED, *ALL], ids=lambda case: case.name)
def test_elementwise_is_what_may_be_cut_into_parts(case: Any) -> None:
    options = {**case.needs, "lr": 0.1} if isinstance(case, fused.FusedCase) else case.options
    values = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.25, 4.0])
    whole = [values.clone().requires_grad_()]
    parts = [part.clone().requires_grad_() for part in values.split([2, 4])]
    for tensors in (whole, parts):
        optimizer = case.kind(tensors, **options)
        for number in range(3):
            for tensor in tensors:
                tensor.grad = tensor.detach() - number
            optimizer.step()
    is_elementwise = torch.equal(whole[0], torch.cat(parts))
    optimizer = case.kind(params(), **options)
    optimizer.state.clear()  # torch's Adagrad makes it at once
    if is_elementwise:
        check_elementwise(optimizer)
    else:
        kind = type(optimizer).__name__
        assert_refused(
            "optim", "not elementwise", lambda: check_elementwise(optimizer), optimizer, kind=kind
        )


@pytest.mark.parametrize("kind", ["FusedAdam", "FusedMixedPrecisionLamb"])
def test_weights_written_without_a_trace_before_a_load_count(kind: str) -> None:
    """Loaded float32 copies are compared with the weights, as at the first step."""
    given: dict[str, Any] = (
        {"capturable": True, "master_weights": True}
        if kind == "FusedAdam"
        else {"reduced_precision_dtype": torch.bfloat16}
    )
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer: Any = getattr(optimizers, kind)([param], lr=0.1, **given)
    for _ in range(2):
        param.grad = torch.ones_like(param)
        optimizer.step()
    state = optimizer.state_dict()
    param.data.copy_(torch.full((4,), 5.0))
    optimizer.load_state_dict(state)
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert (param.float() - 5.0).abs().max() < 1.0


@pytest.mark.parametrize("given", [{"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9}, {}])
def test_a_group_without_gradients_is_left_out_under_a_scaler(given: dict[str, float]) -> None:
    used, unused = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer = optimizers.FusedSGD([{"params": [used]}, {"params": [unused]}], lr=0.5, **given)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    twin = nn.Parameter(torch.ones(3))
    plain = torch.optim.SGD([twin], lr=0.5, **given)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale((used * 2.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        twin.grad = torch.full((3,), 2.0)
        plain.step()
    assert torch.equal(used, twin)
    assert torch.equal(unused, torch.ones(3))


def test_a_skipped_first_step_of_a_late_parameter_is_not_its_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the device decides; only the first gradient enters a momentum undampened."""
    monkeypatch.setattr("preamp.optim.fused.base.host_reaches", lambda _: False)
    early, late = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer: Any = optimizers.FusedSGD([early, late], lr=0.5, momentum=0.5, dampening=0.5)

    def step(found_inf: float, *params: nn.Parameter) -> None:
        for param in params:
            param.grad = torch.full((2,), 0.5)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(found_inf)
        optimizer.step()

    for _ in range(3):
        step(0.0, early)
    step(1.0, early, late)
    step(0.0, early, late)
    assert torch.equal(late, torch.full((2,), 0.75))
    assert torch.equal(optimizer.state[late]["momentum_buffer"], torch.full((2,), 0.5))
