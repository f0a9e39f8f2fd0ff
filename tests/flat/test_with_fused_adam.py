# SPDX-License-Identifier: BSD-3-Clause
"""The pair that BERT scripts of early 2019 used: the flat FP16_Optimizer around FusedAdam."""

from typing import Any

import pytest
import torch
from torch import nn

from flat.early_adam import EarlyAdam
from preamp.optimizers import FP16_Optimizer, FusedAdam

OPTIONS: dict[str, Any] = {"lr": 0.125, "betas": (0.5, 0.75), "eps": 2.0**-10}


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)


def groups(net: nn.Module) -> list[dict[str, Any]]:
    """Weights decay, biases do not, as those scripts had it."""
    named = list(net.named_parameters())
    return [
        {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.01},
        {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scaling", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_it_trains_as_the_formula_says(
    dtype: torch.dtype, scaling: dict[str, Any], max_grad_norm: float
) -> None:
    ours, theirs = model(dtype), model(dtype)
    fused = FP16_Optimizer(
        FusedAdam(groups(ours), bias_correction=False, max_grad_norm=max_grad_norm, **OPTIONS),
        verbose=False,
        **scaling,
    )
    formula = FP16_Optimizer(
        EarlyAdam(groups(theirs), max_grad_norm=max_grad_norm, **OPTIONS), verbose=False, **scaling
    )
    for step in range(6):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        for net, optimizer in ((ours, fused), (theirs, formula)):
            for group in optimizer.param_groups:
                group["lr"] = 0.125 / (1 + step)  # a schedule edits the groups in place
            loss = net(x).float().square().mean() * (float("inf") if step == 3 else 1.0)
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert fused.cur_scale == formula.cur_scale
    for mine, wanted in zip(fused.fp32_groups_flat, formula.fp32_groups_flat, strict=True):
        assert torch.allclose(mine, wanted, rtol=8 * 2.0**-23, atol=2.0**-22)
    for net, optimizer in ((ours, fused), (theirs, formula)):
        halves, masters = optimizer.fp16_groups_flat, optimizer.fp32_groups_flat
        for flat, master in zip(halves, masters, strict=True):
            assert torch.equal(flat, master.to(dtype))
        assert next(net.parameters()).data_ptr() == halves[0].data_ptr()
