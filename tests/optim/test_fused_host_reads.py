# SPDX-License-Identifier: BSD-3-Clause
"""No optimizer's step reads a value back to the host, on any device."""

import math
from typing import Any

import pytest
import torch

from cases.fused import (
    ADAM,
    FUSED,
    MIXED_LAMB,
    FusedCase,
    Options,
    gradients,
    parameters,
    variant_id,
)
from cases.host_reads import NoHostReads, far_from_the_host
from cases.tolerances import assert_same
from preamp.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

SHAPES = ((3, 2), (), (0,))
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
KINDS: list[tuple[FusedCase, Options]] = [
    *((case, {**case.needs, **variant}) for case in FUSED for variant in case.variants),
    (ADAM, {"capturable": True, "master_weights": True}),
    (MIXED_LAMB, {"reduced_precision_dtype": torch.float16}),
]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    far_from_the_host(monkeypatch)


def test_a_read_is_noticed() -> None:
    with pytest.raises(AssertionError, match="reads a value"), NoHostReads():
        bool(torch.ones(()) > 0)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=variant_id)
@pytest.mark.parametrize(("case", "options"), KINDS, ids=variant_id)
def test_steps(case: FusedCase, options: Options, dtype: torch.dtype, device: str) -> None:
    results = []
    for watched in (device, "cpu"):
        params = [p.detach().to(watched).requires_grad_() for p in parameters(SHAPES, dtype)]
        optimizer = case.kind(params, **options)
        for step in range(3):
            for param, grad in zip(params, gradients(SHAPES, step, dtype), strict=True):
                param.grad = grad.to(watched)
            with NoHostReads():
                optimizer.step()
        results.append([param.detach().cpu() for param in params])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [1.0, math.inf])
@pytest.mark.parametrize(
    "make",
    [
        lambda p: FusedAdam(p, capturable=True),
        lambda p: FusedAdam(p, capturable=True, master_weights=True),
        lambda p: MIXED_LAMB.kind(p, reduced_precision_dtype=torch.float16),
        FusedAdam,
        FusedLAMB,
        FusedNovoGrad,
    ],
    ids=["adam", "adam masters", "lamb", "counting adam", "counting lamb", "counting novograd"],
)
def test_steps_of_a_scaler(make: Any, factor: float, device: str) -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = make([param])
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    for turn in range(3):
        scaler.scale(param.float().sum() * (factor if turn == 1 else 1.0)).backward()
        with NoHostReads():
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    assert optimizer.state_dict()["param_groups"][0]["step"] == (3 if factor == 1.0 else 2)


@pytest.mark.parametrize("device", DEVICES)
def test_arguments_that_are_numbers(device: str) -> None:
    param = torch.nn.Parameter(torch.zeros(2, device=device))
    sgd, early = FusedSGD([param], lr=1.0), FusedAdam([param], max_grad_norm=1.0)
    param.grad = torch.ones(2, device=device)
    sgd.most_recent_scale = 4.0
    with NoHostReads():
        sgd.step()
    assert_same(param.detach().cpu(), torch.full((2,), -0.25))
    with NoHostReads():
        early.step()  # which takes the norm
    assert not torch.equal(param.detach().cpu(), torch.full((2,), -0.25))
